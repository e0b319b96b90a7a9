"""States that a split engine saves: they stay on the workers, and what is put back is what was saved.

An engine alone with as many checkpoints is the measure: the same tokens, every bit of their
log-probabilities, and as many tokens of each prompt taken from what was kept.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.spec import DraftSpec, StatesSpec
from mesh_llm.lab.split import SplitPlan, worker_spec
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.relayed_worker import Liar, at
from tests.support.sampling import first, sampled
from tests.support.split import Answer, Client, client, lenders, over, plan_for, token_ids, until

LAYERS = 6
FAST_S = 30.0
CHECKPOINTS = 4
STATES = StatesSpec(checkpoints=CHECKPOINTS)
FLASH_OFF, FLASH_AUTO = 0, -1
SETTINGS: dict[str, Setting] = {
    "n_batch": 64,
    "n_ubatch": 32,
    "n_ctx_checkpoints": CHECKPOINTS,
    "cache_idle_slots": False,
}
PROMPT = 300
FEATURES = 132
"""Where a worker's lie in its answer to HELLO."""


async def plan(
    folder: Path, libraries: dict[str, Path], architecture: str, settings: dict[str, Setting], **fields: Any
) -> SplitPlan:
    model = tiny_gguf.write(folder / f"{architecture}.gguf", architecture, layers=LAYERS)
    return await plan_for(model, libraries, **({"context": 1024, "settings": SETTINGS | settings} | fields))


async def two_turns(client: Client, *, seed: int = 0, **options: Any) -> tuple[Answer, Answer]:
    """A question, and another one after an answer whose end has changed, as where reasoning is left out."""
    options = {"n_predict": 12, "ignore_eos": True} | options
    prompt = token_ids(PROMPT, seed=seed)
    answer = await client.complete(prompt, **options)
    more = [*prompt, *answer.tokens[:-2], *token_ids(40, seed=seed + 7)]
    return answer, await client.complete(more, **options)


@pytest.mark.parametrize("architecture", ["lfm2", "granitehybrid"])
async def test_a_hybrid_goes_on_from_a_checkpoint(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    alone = await plan(tmp_path, libraries, architecture, {})
    async with client(alone) as asking:
        expected = await two_turns(asking)
    assert expected[1].cached >= PROMPT - 8

    for workers in ((6,), (2, 1, 2)):
        async with client(over(alone, *workers, states=STATES)) as asking:
            assert await two_turns(asking) == expected


async def test_without_states_all_is_read_again(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan(tmp_path, libraries, "lfm2", {"n_ctx_checkpoints": 0})
    async with client(over(alone, 3, 3)) as asking:
        _, second = await two_turns(asking)
    assert second.cached == 0


async def test_a_worker_that_is_too_old_for_states(
    libraries: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two is enough: all is read again, which the log says once."""
    alone = await plan(tmp_path, libraries, "lfm2", {})
    async with client(alone) as asking:
        expected = await two_turns(asking)
    trace = tmp_path / "trace"
    # How many checkpoints there are is left to the engine child: none, then.
    settings = {name: value for name, value in SETTINGS.items() if name != "n_ctx_checkpoints"}
    split = over(alone, 3, 2, states=STATES, settings=settings, trace=trace)
    specs = [worker_spec(split, tmp_path / f"{index}.sock") for index in range(2)]
    async with lenders(*specs) as (new, other):
        old = Liar(other, at(FEATURES, bytes(4)), at_once=True)
        async with client(split, [new, old]) as asking:
            found = await two_turns(asking)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert found[1].cached == 0
    frames = {json.loads(line)["frame"] for line in trace.read_text().splitlines()}
    assert frames & {"RUN", "RESERVE", "COPIES"} == {"RUN"}
    (told,) = (message for message in caplog.messages if "saved states are off" in message)
    assert told.endswith("the mesh-llm of a worker is too old to keep them")


async def test_a_window_that_has_moved_on_goes_back(libraries: dict[str, Path], tmp_path: Path) -> None:
    """The cells of the beginning of an answer are gone when it is long; a checkpoint has them."""
    alone = await plan(tmp_path, libraries, "gemma3", {})

    async def ask(asking: Client) -> Answer:
        prompt = token_ids(PROMPT, seed=2)
        answer = await asking.complete(prompt, n_predict=400, ignore_eos=True)
        return await asking.complete([*prompt, *answer.tokens[:5], *token_ids(30)], n_predict=8)

    async with client(alone) as asking:
        expected = await ask(asking)
    assert expected.cached >= PROMPT - 8
    async with client(over(alone, 2, 2, states=STATES)) as asking:
        assert await ask(asking) == expected
    async with client(over(alone, 2, 2, settings=SETTINGS | {"n_ctx_checkpoints": 0})) as asking:
        assert (await ask(asking)).cached == 0


async def conversations(client: Client, count: int, *, turns: int = 2, **options: Any) -> list[Answer]:
    """So many of them in turns: each goes on when all the others have had theirs."""
    options = {"n_predict": 6, "ignore_eos": True} | options
    texts = [token_ids(120 + 11 * index, seed=index) for index in range(count)]
    answers = []
    for turn in range(turns):
        for index, text in enumerate(texts):
            answers.append(await client.complete(text, **options))
            text.extend([*answers[-1].tokens, *token_ids(20 + index, seed=31 * turn + index)])
    return answers


@pytest.mark.parametrize(
    ("architecture", "flash"),
    first(
        3,
        [
            *[("llama", FLASH_AUTO), ("gemma3", FLASH_OFF), ("lfm2", FLASH_AUTO)],
            *[
                ("llama", FLASH_OFF),
                ("gemma3", FLASH_AUTO),
                ("lfm2", FLASH_OFF),
                ("granitehybrid", FLASH_OFF),
            ],
            *[
                ("deepseek2", FLASH_AUTO),
                ("gpt-oss", FLASH_AUTO),
                ("gpt-oss", FLASH_OFF),
                ("qwen3moe", FLASH_AUTO),
            ],
        ],
    ),
)
async def test_more_conversations_than_slots(
    architecture: str, flash: int, libraries: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Setting] = {"cache_ram_mib": -1, "flash_attn_type": flash}
    alone = await plan(tmp_path, libraries, architecture, settings, slots=2)
    async with client(alone) as asking:
        expected = await conversations(asking, 5)
    assert min(answer.cached for answer in expected[5:]) > 100

    async with client(over(alone, 2, 2, states=STATES)) as asking:
        assert await conversations(asking, 5) == expected


@pytest.mark.parametrize("flash", sampled([FLASH_AUTO, FLASH_OFF], FLASH_OFF))
async def test_texts_whose_cells_lie_scattered(
    flash: int, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Two answers at once take cells of one cache in turns: a state is many ranges, put back elsewhere."""
    one_cache: dict[str, Setting] = {"kv_unified": True, "cache_idle_slots": True}
    settings = one_cache | {"cache_ram_mib": -1, "flash_attn_type": flash}
    alone = await plan(tmp_path, libraries, "llama", settings, slots=2)

    async def ask(asking: Client) -> list[Answer]:
        texts = [token_ids(90, seed=1), token_ids(110, seed=2)]
        answers = await asking.complete_all(texts, n_predict=24, ignore_eos=True)
        others = [await asking.complete(token_ids(130, seed=seed), n_predict=5) for seed in (3, 4, 5)]
        more = [[*text, *answer.tokens, 7, 8, 9] for text, answer in zip(texts, answers, strict=True)]
        return [*answers, *others, *[await asking.complete(text, n_predict=8) for text in more]]

    async with client(alone) as asking:
        expected = await ask(asking)
    assert min(answer.cached for answer in expected[-2:]) > 100
    async with client(over(alone, 2, 2, states=STATES)) as asking:
        assert await ask(asking) == expected


async def test_two_slots_at_once(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan(tmp_path, libraries, "granitehybrid", {}, slots=2)

    async def ask(asking: Client) -> list[Answer]:
        """Two texts in one request each time, so that they share batches in the same way."""
        options = {"n_predict": 8, "ignore_eos": True}
        texts = [token_ids(200, seed=1), token_ids(230, seed=2)]
        answers = await asking.complete_all(texts, **options)
        more = [
            [*text, *answer.tokens[:-3], *token_ids(25, seed=9)]
            for text, answer in zip(texts, answers, strict=True)
        ]
        return [*answers, *await asking.complete_all(more, **options)]

    async with client(alone) as asking:
        expected = await ask(asking)
    assert min(answer.cached for answer in expected[2:]) > 150
    async with client(over(alone, 2, 2, states=STATES)) as asking:
        assert await ask(asking) == expected


async def test_two_answers_to_one_prompt(libraries: dict[str, Path], tmp_path: Path) -> None:
    """The second slot goes on from a copy of the first one's text, with its checkpoints."""
    alone = await plan(tmp_path, libraries, "lfm2", {}, slots=2)

    async def ask(asking: Client) -> list[Any]:
        prompt = token_ids(200, seed=3)
        options = {"n_predict": 6, "ignore_eos": True, "temperature": 0, "return_tokens": True}
        status, both = await asking.post("/completion", {"prompt": prompt, "n_cmpl": 2} | options)
        assert status == 200, both
        more = [
            [*prompt, *answer["tokens"][:-2], *token_ids(30, seed=5 + i)] for i, answer in enumerate(both)
        ]
        # Both slots have the text: each of them is asked to go on with it, in turns.
        after = [await asking.complete(text, id_slot=slot, n_predict=4) for slot in (1, 0) for text in more]
        return [[answer["tokens"] for answer in both], after]

    async with client(alone) as asking:
        expected = await ask(asking)
    assert expected[1][0].cached > 150
    async with client(over(alone, 3, 2, states=STATES)) as asking:
        assert await ask(asking) == expected


async def test_a_wrong_draft_is_taken_back(libraries: dict[str, Path], tmp_path: Path) -> None:
    """An engine that drafts for a recurrent model saves a state before each draft."""
    alone = await plan(tmp_path, libraries, "lfm2", {})
    random = tiny_gguf.write(tmp_path / "draft.gguf", "llama", layers=1, seed=5)
    draft = DraftSpec(model=str(random), model_depth=4)
    split = over(alone, 3, 2, states=STATES, draft=draft, delay_s=0.01)
    body = {"prompt": token_ids(60, seed=6), "n_predict": 40, "ignore_eos": True, "temperature": 0}

    async def ask(asking: Client) -> dict[str, Any]:
        status, document = await asking.post("/completion", body | {"return_tokens": True})
        assert status == 200, document
        return dict(document)

    async with client(alone) as asking:
        expected = await ask(asking)
    async with client(split) as asking:
        found = await ask(asking)
    assert found["tokens"] == expected["tokens"]
    assert found["timings"]["draft_n"] > found["timings"]["draft_n_accepted"]


@pytest.mark.parametrize("architecture", ["lfm2", "llama"])
async def test_a_state_that_is_gone_is_read_again(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Room for one or two states, which others then overwrite: what comes back is right, or read anew."""
    settings: dict[str, Setting] = {"cache_ram_mib": -1}
    alone = await plan(tmp_path, libraries, architecture, settings, slots=2)
    async with client(alone) as asking:
        anew = await conversations(asking, 5, cache_prompt=False)
    room = 30_000 if architecture == "lfm2" else 200_000
    small = StatesSpec(checkpoints=CHECKPOINTS, most_bytes=room)
    async with client(over(alone, 2, 2, states=small)) as asking:
        found = await conversations(asking, 5)
    cached = [answer.cached for answer in found]
    assert min(cached[5:]) == 0, cached
    # How a prompt is cut decides the last bits; the tokens are the same.
    assert [answer.tokens for answer in found] == [answer.tokens for answer in anew]


async def test_no_state_crosses_a_link(libraries: dict[str, Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    alone = await plan(tmp_path, libraries, "granitehybrid", {"cache_ram_mib": -1}, trace=trace)
    async with client(over(alone, 3, 3, states=STATES)) as asking:
        await conversations(asking, 3)
        await two_turns(asking, seed=50)
    frames = [json.loads(line) for line in trace.read_text().splitlines()]
    copies = [frame["bytes"] for frame in frames if frame["frame"] == "COPIES"]
    assert len(copies) >= 10
    # A range each for what lies equally far apart: fewer than tensors.
    assert max(copies) <= 8 + 32 * 2 * LAYERS
    # Behind the warm-up nothing is read but results of the last worker's runs, and nothing is written.
    ready = next(at for at, frame in enumerate(frames) if frame["frame"] == "RESERVE")
    sent = Counter((frame["link"], frame["frame"]) for frame in frames[ready:] if frame["sent"])
    assert {link for link, frame in sent if frame == "GET"} == {"MESH1"}
    assert 0 < sent["MESH1", "GET"] <= sent["MESH1", "RUN"]
    assert not [link for link, frame in sent if frame == "SET"]


async def test_a_lost_worker_takes_its_states_along(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan(tmp_path, libraries, "lfm2", {"cache_ram_mib": -1})
    async with client(over(alone, 3, 3, states=STATES)) as asking:
        await two_turns(asking)
        pid = asking.engine.workers[1].child.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        supervisor = asking.engine.supervisor
        await until(lambda: "MESH1" in supervisor.report.failed_links, within_s=FAST_S, what="it is reported")
        for seed in (0, 1):
            status, document = await asking.post("/completion", {"prompt": token_ids(320, seed=seed)})
            assert status == 500, document
        assert supervisor.report.restarts == 0


async def test_a_slot_file_with_states_of_another_engine(libraries: dict[str, Path], tmp_path: Path) -> None:
    """What it says of checkpoints means nothing to this process; a made-up one neither."""
    alone = await plan(tmp_path, libraries, "lfm2", {"slot_save_path": f"{tmp_path}/"})
    split = over(alone, 3, 2, states=STATES)
    prompt = token_ids(PROMPT, seed=4)
    more = [*prompt[:-1], *token_ids(20, seed=8)]
    async with client(split) as asking:
        expected = await asking.complete(more, n_predict=6, cache_prompt=False)
        await asking.complete(prompt, n_predict=1)
        for name in ("saved", "forged"):
            assert (await asking.post("/slots/0?action=save", {"filename": name}))[0] == 200
    content = (tmp_path / "forged").read_bytes()
    references = content.count(b"MSHSTATE")
    assert references > 0
    at = content.rindex(b"MSHSTATE") + 24
    (tmp_path / "forged").write_bytes(content[:at] + bytes([1]) + content[at + 1 :])
    async with client(split) as asking:
        for name in ("saved", "forged"):
            status, document = await asking.post("/slots/0?action=restore", {"filename": name})
            assert status == 200, document
            answer = await asking.complete(more, n_predict=6)
            assert answer.cached == 0
            assert answer.tokens == expected.tokens
