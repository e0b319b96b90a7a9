"""Guessing ahead: the same text, sooner; and never more than a draft's worth of trouble."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.inspect import vocabularies_differ
from mesh_llm.engine.spec import DraftSpec, StatesSpec
from mesh_llm.lab.split import SplitPlan
from mesh_llm.types import Setting, SpeculationCounters
from tests.support import stepping_models, tiny_gguf
from tests.support.architectures import LAYERS, Metadata
from tests.support.command import mesh_llm
from tests.support.engine_lab import EngineLab, Tiny, completion
from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.sampling import first, sampled
from tests.support.split import Client, client, over, plan_for, token_ids, until
from tests.support.stepping_models import NEVER

TEXT = DraftSpec(text_depth=24)
FAR_S = 0.01
"""One way: far enough that every right guess pays."""
CONTEXT = 1024
REPORTED_S = 30.0
SETTLED_S = 2.5
"""Without news from an engine that has some every second: it may stand still for most of that."""

_LEDGER = (
    "The harbour master kept a ledger of every ship that came in: her name, her cargo, her captain and "
    "the hour of the tide. On the third of May he wrote of the Amelia, with salt and timber.\n"
)
_GOODS = json.dumps(
    [
        {"id": number, "name": name, "price": 3 * number + 2}
        for number, name in enumerate(("apple", "pear", "plum"))
    ],
    indent=1,
)
REPEATED = _LEDGER * 2
EDITED = f"A document:\n{_GOODS}\nThe same document with every price raised by 1:\n[\n"
PROSE = "Once upon a time there was a sailor who"
LONG = _LEDGER * 3 + " ".join(f"On day {day} there came {day * 7 % 13} ships." for day in range(40))
"""More than one micro-batch."""
COUNTED = "1 2 3 4 5 6 1 2 3 4 5 6 1 2 3 4"
PROMPTS = {"repeated": REPEATED, "edited": EDITED, "prose": PROSE}


async def answers(asking: Client, *, tokens: int = 24) -> dict[str, tuple[int, ...]]:
    """The last of them goes on from the one before, in the same slot."""
    once = {"n_predict": tokens, "ignore_eos": True, "n_probs": 0, "cache_prompt": False}
    found = {}
    for name, prompt in PROMPTS.items():
        found[name] = (await asking.complete(prompt, **once)).tokens
    kept = {"n_predict": tokens, "ignore_eos": True, "n_probs": 0, "cache_prompt": True}
    found["first"] = (await asking.complete(EDITED, **kept)).tokens
    found["goes on"] = (await asking.complete(EDITED + "And again:\n[\n", **kept)).tokens
    return found


async def counters(asking: Client, told: SpeculationCounters | None = None) -> SpeculationCounters:
    """What the engine has told of its guesses since `told`, when it has told of the last one."""
    supervisor = asking.engine.supervisor
    await until(
        lambda: supervisor.report.speculation not in (None, told),
        within_s=REPORTED_S,
        what="the engine tells of guesses",
    )
    while told != supervisor.report.speculation:
        told = supervisor.report.speculation
        await asyncio.sleep(SETTLED_S)
    assert told is not None
    return told


def drafted(asking: Client) -> int:
    """As the engine has told so far."""
    told = asking.engine.supervisor.report.speculation
    return 0 if told is None else told.drafted


@pytest.fixture
async def plan(smollm2: Path, libraries: dict[str, Path]) -> SplitPlan:
    return await plan_for(smollm2, libraries, context=CONTEXT)


@pytest.fixture(scope="module")
def told(smollm2: Path, libraries: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """What the engine alone answers, without guesses."""

    async def ask() -> dict[str, tuple[int, ...]]:
        async with client(await plan_for(smollm2, libraries, context=CONTEXT)) as asking:
            return await answers(asking)

    return asyncio.run(ask())


SPLIT = (10, 10, 8)


@pytest.mark.parametrize("layers", sampled([(), SPLIT], SPLIT), ids=["alone", "split"])
async def test_the_text_itself_drafts(
    plan: SplitPlan, told: dict[str, tuple[int, ...]], layers: tuple[int, ...]
) -> None:
    async with client(over(plan, *layers, draft=TEXT, delay_s=FAR_S if layers else 0.0)) as asking:
        assert await answers(asking) == told
        seen = await counters(asking)
        assert 0 < seen.accepted <= seen.drafted == seen.text_drafted
        if layers:
            assert await has_paid(asking, seen)


async def has_paid(asking: Client, seen: SpeculationCounters) -> bool:
    """By what the engine itself has measured, in one of three tries: a pause of the machine costs, too."""
    plain_s, took_s = seen.plain_seconds, seen.seconds
    for _ in range(2):
        if plain_s > took_s:
            break
        await answers(asking)
        later = await counters(asking, seen)
        plain_s, took_s = later.plain_seconds - seen.plain_seconds, later.seconds - seen.seconds
        seen = later
    return plain_s > took_s


@pytest.mark.full
async def test_a_prompt_of_several_batches(plan: SplitPlan) -> None:
    once = {"n_predict": 24, "ignore_eos": True, "n_probs": 0, "cache_prompt": False}
    async with client(plan) as asking:
        expected = await asking.complete(LONG, **once)
    async with client(over(plan, *SPLIT, draft=TEXT)) as asking:
        assert (await asking.complete(LONG, **once)).tokens == expected.tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "text_depth"), first(1, [(SPLIT, 0), ((), 24)]), ids=["split", "with the text, alone"]
)
async def test_a_draft_model(
    plan: SplitPlan,
    smollm2: Path,
    told: dict[str, tuple[int, ...]],
    layers: tuple[int, ...],
    text_depth: int,
) -> None:
    draft = DraftSpec(model=str(smollm2), model_depth=8, text_depth=text_depth)
    async with client(over(plan, *layers, draft=draft, delay_s=FAR_S if layers else 0.0)) as asking:
        assert await answers(asking) == told
        seen = await counters(asking)
    # The model guesses its own next tokens: right, but for the rounding of other batches.
    own, right = seen.drafted - seen.text_drafted, seen.accepted - seen.text_accepted
    assert own > 0
    assert right >= 0.9 * own


@pytest.mark.full
async def test_a_draft_that_is_never_right_is_given_up(
    plan: SplitPlan, smollm2: Path, told: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    random = tiny_gguf.write(tmp_path / "random.gguf", "llama", layers=2, tokenizer=smollm2)
    async with client(replace(plan, draft=DraftSpec(model=str(random), model_depth=8))) as asking:
        assert await answers(asking) == told
        seen = await counters(asking)
    tokens = sum(len(each) for each in told.values())
    assert 0 < seen.drafted < 0.5 * tokens


@pytest.mark.full
async def test_requests_at_once_share_steps(plan: SplitPlan, smollm2: Path) -> None:
    """Each gets its own text, whatever the others guess."""
    options = {"n_predict": 24, "ignore_eos": True, "n_probs": 0, "cache_prompt": False}
    prompts = [_LEDGER, COUNTED, PROSE, COUNTED + PROSE]
    # In small micro-batches: prompts that are read together are cut in other places, and some processors
    # compute whole tiles of 64 tokens otherwise (native/cpu_attention.cmake).
    wide = replace(plan, slots=4, settings=plan.settings | {"n_ubatch": 32})
    async with client(wide) as asking:
        expected = [(await asking.complete(prompt, **options)).tokens for prompt in prompts]
    draft = DraftSpec(text_depth=24, model=str(smollm2), model_depth=8)
    async with client(over(wide, 15, 15, draft=draft, delay_s=FAR_S)) as asking:
        for _ in range(2):  # the second time with rates that are known
            found = await asking.complete_all(prompts, **options)
            assert [answer.tokens for answer in found] == expected


@pytest.mark.full
async def test_who_asks_for_probabilities_gets_those_of_every_token(plan: SplitPlan, smollm2: Path) -> None:
    options = {"n_predict": 24, "ignore_eos": True, "cache_prompt": False}
    draft = DraftSpec(text_depth=24, model=str(smollm2), model_depth=8)
    async with client(over(plan, 15, 15, draft=draft, delay_s=FAR_S)) as asking:
        without = await asking.complete(REPEATED, n_probs=0, **options)
        seen = await counters(asking)
        found = await asking.complete(REPEATED, n_probs=3, **options)
        # Nothing was guessed for the second; nothing is left of that for the third.
        then = await counters(asking, seen)
        assert then.drafted == seen.drafted > 0
        await asking.complete(REPEATED, n_probs=0, **options)
        await until(
            lambda: drafted(asking) > then.drafted, within_s=REPORTED_S, what="the engine guesses again"
        )
    assert found.tokens == without.tokens
    assert [len(place) for place in found.logprobs] == [3] * len(found.tokens)


@pytest.mark.full
async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(
    plan: SplitPlan, smollm2: Path, told: dict[str, tuple[int, ...]]
) -> None:
    draft = DraftSpec(text_depth=24, model=str(smollm2), model_depth=8)
    async with client(over(plan, 15, 15, draft=draft, delay_s=FAR_S)) as asking:
        for _ in range(3):
            count = 0
            async for _event in asking.events(REPEATED, n_predict=200, ignore_eos=True):
                count += 1
                if count == 5:
                    break
        found = await asking.complete(EDITED, n_predict=24, ignore_eos=True, n_probs=0, cache_prompt=False)
        assert found.tokens == told["edited"]


# -- states that cannot be cut back -----------------------------------------------------------------

KEPT: dict[str, Setting] = {"n_ctx_checkpoints": 4, "cache_idle_slots": False}
STATES = StatesSpec(checkpoints=4)
LEAST_ROOM = 1 << 12
"""Of a worker for saved states: less than one takes."""


def misleading() -> list[int]:
    """Passages that the model's answer has, too, each with another end."""
    period = stepping_models.PERIOD
    around = stepping_models.orbit(20, 2 * period, period=period)
    passages = [[*around[start : start + 4], 300 + start] for start in range(period)]
    return [*(token for passage in passages for token in passage), around[0]]


async def said(
    asking: Client, prompt: list[int], *, tokens: int = 60, **options: Any
) -> tuple[list[int], int, int]:
    """The answer's tokens, how many were drafted, and how many of these were right."""
    once = {"n_predict": tokens, "ignore_eos": True, "temperature": 0, "return_tokens": True}
    status, document = await asking.post(
        "/completion", once | {"prompt": prompt, "cache_prompt": False} | options
    )
    assert status == 200, document
    timings = document["timings"]
    return document["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


@pytest.mark.parametrize(
    "architecture", sampled(["lfm2", "qwen3next", "granitehybrid", "mamba2", "rwkv7"], "lfm2")
)
async def test_a_recurrent_model_is_drafted_for(
    architecture: str, lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """Its state is saved before each draft, and put back after a wrong one."""
    model = stepping_models.write(lab, architecture).path
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, misleading())
    for plan in (replace(alone, draft=TEXT), over(alone, 2, 2, draft=TEXT, states=STATES, delay_s=FAR_S)):
        async with client(plan) as asking:
            tokens, drafted, right = await said(asking, misleading())
            assert tokens == expected
            if plan.workers:
                assert 0.3 * len(tokens) < right < drafted


async def test_a_state_that_cannot_be_saved_is_not_drafted_from(
    lab: EngineLab, libraries: dict[str, Path]
) -> None:
    model = stepping_models.write(lab, "lfm2").path
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, misleading())
    cramped = replace(STATES, most_bytes=LEAST_ROOM)
    async with client(over(alone, 2, 2, draft=TEXT, states=cramped, delay_s=FAR_S)) as asking:
        assert (await said(asking, misleading()))[::2] == (expected, 0)


# -- a model's own head for further tokens ---------------------------------------------------------

HEAD = DraftSpec(head_depth=3, head_layer=LAYERS)
GUESSING = ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "glm-dsa", "deepseek2", "deepseek32", "hy_v3"]
GUESSING += ["cohere2moe"]
PROMPT = [*token_ids(30), 20]
"""No special token is in what a model says after it."""


@pytest.mark.parametrize("architecture", sampled(GUESSING, "qwen35", "glm4moe"))
async def test_a_head_that_is_right(architecture: str, lab: EngineLab, libraries: dict[str, Path]) -> None:
    model = stepping_models.write_with_head(lab, architecture, right=True).path
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, PROMPT)
    for plan in (replace(alone, draft=HEAD), over(alone, 2, 3, draft=HEAD, states=STATES, delay_s=FAR_S)):
        async with client(plan) as asking:
            tokens, drafted, right = await said(asking, PROMPT)
            assert (tokens, right) == (expected, drafted)
            if plan.workers:
                # Three of four tokens, but for the first steps.
                assert right > 0.6 * len(tokens)


async def test_a_head_that_is_wrong_is_given_up(lab: EngineLab, libraries: dict[str, Path]) -> None:
    model = stepping_models.write_with_head(lab, "qwen35", right=False).path
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, PROMPT, tokens=200)
    for plan in (replace(alone, draft=HEAD), over(alone, 2, 3, draft=HEAD, states=STATES)):
        async with client(plan) as asking:
            answers = [await said(asking, PROMPT, tokens=200) for _ in range(3)]
        assert [tokens for tokens, _, _ in answers] == [expected] * 3
        assert sum(right for _, _, right in answers) == 0
        assert answers[-1][1] < 0.5 * len(expected)


@pytest.mark.parametrize("kind", ["MTP", "EAGLE3"])
async def test_a_head_reads_on_where_a_text_goes_on(
    kind: str, lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """Texts that share a beginning, two at once, in slots whose text was another one's before."""
    layers: tuple[int, ...] = (2, 3)
    if kind == "MTP":
        model, head = stepping_models.write_with_head(lab, "qwen35", right=True).path, HEAD
    else:
        model, layers = stepping_models.write(lab, "llama", period=NEVER).path, (1,)
        head = by_eagle3(stepping_models.write_eagle3(lab, by_layers=True), 1)
    settings: dict[str, Setting] = {"n_ubatch": 32, "cache_ram_mib": -1}
    alone = await plan_for(model, libraries, settings=KEPT | settings, slots=2)
    options = {"n_predict": 24, "ignore_eos": True, "n_probs": 0, "cache_prompt": True}
    prompts = [token_ids(90, seed=seed) for seed in (1, 2, 3)]

    async def ask(asking: Client) -> list[tuple[int, ...]]:
        found = [answer.tokens for answer in await asking.complete_all(prompts[:2], **options)]
        found.append((await asking.complete(prompts[2], **options)).tokens)
        for prompt, tokens in zip(prompts, list(found), strict=True):
            more = [*prompt, *tokens[:-3], 7, 8, 9]
            found.append((await asking.complete(more, **options)).tokens)
        return found

    async with client(alone) as asking:
        expected = await ask(asking)
    both = replace(head, text_depth=24)
    async with client(over(alone, *layers, draft=both, states=STATES, delay_s=FAR_S)) as asking:
        assert await ask(asking) == expected
        await until(lambda: drafted(asking) > 0, within_s=REPORTED_S, what="the engine tells of guesses")
        seen = asking.engine.supervisor.report.speculation
    assert seen is not None
    own = seen.drafted - seen.text_drafted
    assert 0 < 0.8 * own <= seen.accepted - seen.text_accepted


def test_a_head_adds_no_hop(lab: EngineLab) -> None:
    """It reads on the host what the output head does, and nothing of it crosses a link."""
    tiny = stepping_models.write_with_head(lab, "qwen35", right=True)
    requests = [completion(PROMPT, count) for count in (8, 24)]
    plain = lab.answers(tiny, requests, 2, 3)
    found = lab.answers(tiny, requests, 2, 3, draft=HEAD, states=STATES)
    # Who asks for probabilities gets every token by itself.
    hops, runs = found.costs[1].per_token(found.costs[0], 16)
    assert (hops, set(runs.values())) == (3, {1})
    assert [tokens for tokens, *_ in found.said] == [tokens for tokens, *_ in plain.said]


def test_a_node_drafts_with_its_models_own_head(lab: EngineLab) -> None:
    """And a person can do without."""
    model = stepping_models.write_with_head(lab, "qwen35", right=True).path
    small = ("--ctx-size", "512", "--parallel", "1", "--threads", "1")
    names = []
    for options in ((), ("--no-draft",)):
        with temporary_home() as home, NodeProcess(*small, *options, home=home, model=model) as node:
            node.until_ready()
            draft = node.status()["model"]["draft"]
            names.append(draft and draft["name"])
            reply = node.ask("/v1/completions", {"prompt": "abc", "max_tokens": 40, "temperature": 0})
            assert reply.status == 200, reply.body
    assert names == ["its MTP head", None]


# -- EAGLE3 heads ----------------------------------------------------------------------------------


def by_eagle3(head: Tiny, depth: int) -> DraftSpec:
    return DraftSpec(model=str(head.path), model_depth=depth, reads_layers=True)


@pytest.mark.parametrize("depth", [1, 3], ids=["by layers", "by tokens"])
@pytest.mark.parametrize(
    "architecture", sampled(["llama", "qwen3", "qwen3moe", "gpt-oss", "gemma4", "minimax-m2"], "llama")
)
async def test_an_eagle3_head_that_is_right(
    architecture: str, depth: int, lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """Alone, and split where the host has all that the head reads."""
    model = stepping_models.write(lab, architecture, period=NEVER).path
    draft = by_eagle3(stepping_models.write_eagle3(lab, by_layers=depth == 1), depth)
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, PROMPT)
    for plan in (replace(alone, draft=draft), over(alone, 1, draft=draft, states=STATES, delay_s=FAR_S)):
        async with client(plan) as asking:
            tokens, drafted, right = await said(asking, PROMPT)
            assert (tokens, right) == (expected, drafted)
            if plan.workers:
                assert right > 0.8 * depth / (depth + 1) * len(tokens)


@pytest.mark.full
async def test_an_eagle3_head_reads_what_the_last_layer_makes(
    lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """Over a link, as every right guess pays there; a plan has this only alone."""
    model = stepping_models.write(lab, "gpt-oss", period=NEVER).path
    layers = {"target_layers": [1, 3, LAYERS]}
    draft = by_eagle3(stepping_models.write_eagle3(lab, by_layers=True, metadata=layers), 1)
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(over(alone, 1, draft=draft, states=STATES, delay_s=FAR_S)) as asking:
        tokens, drafted, right = await said(asking, PROMPT)
        assert right == drafted > 0.4 * len(tokens)


async def test_an_eagle3_head_that_is_wrong_is_given_up(lab: EngineLab, libraries: dict[str, Path]) -> None:
    model = stepping_models.write(lab, "llama", period=NEVER).path
    draft = by_eagle3(stepping_models.write_eagle3(lab, right=False), 3)
    alone = await plan_for(model, libraries, settings=KEPT)
    async with client(alone) as asking:
        expected, _, _ = await said(asking, PROMPT, tokens=200)
    for plan in (replace(alone, draft=draft), over(alone, 1, draft=draft, states=STATES)):
        async with client(plan) as asking:
            answers = [await said(asking, PROMPT, tokens=200) for _ in range(3)]
        assert [tokens for tokens, _, _ in answers] == [expected] * 3
        assert sum(right for _, _, right in answers) == 0
        assert answers[-1][1] < 0.5 * len(expected)


def test_an_eagle3_head_adds_no_hop(lab: EngineLab) -> None:
    """Where the host has the layers before those whose inputs it reads."""
    tiny = stepping_models.write(lab, "llama", period=NEVER)
    draft = by_eagle3(stepping_models.write_eagle3(lab), 3)
    requests = [completion(PROMPT, count) for count in (8, 24)]
    plain = lab.answers(tiny, requests, 1)
    found = lab.answers(tiny, requests, 1, draft=draft, states=STATES)
    hops, runs = found.costs[1].per_token(found.costs[0], 16)
    assert (hops, set(runs.values())) == (2, {1})
    assert [tokens for tokens, *_ in found.said] == [tokens for tokens, *_ in plain.said]


@pytest.mark.full
def test_a_node_drafts_with_an_eagle3_head(lab: EngineLab, tmp_path: Path) -> None:
    model = stepping_models.write(lab, "llama", period=NEVER).path
    head = stepping_models.write_eagle3(lab).path
    options = ("--ctx-size", "512", "--parallel", "1", "--threads", "1", "--draft", str(head))
    with temporary_home() as home, NodeProcess(*options, home=home, model=model) as node:
        node.until_ready()
        draft = node.status()["model"]["draft"]
        assert (draft["name"], draft["off"]) == (head.stem, None)
        reply = node.ask("/v1/completions", {"prompt": "abc", "max_tokens": 100, "temperature": 0})
        assert reply.status == 200, reply.body
    drafts, need_bytes = draft_of_plan(model, tmp_path, "--draft", str(head))
    none, plain_bytes = draft_of_plan(model, tmp_path, "--no-draft")
    assert (drafts["off"], none) == (None, None)
    assert need_bytes > plain_bytes + head.stat().st_size


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "it reads layers of width 128 instead of 576"),
        ({"target_hidden_size": 576}, "tokens instead of"),
        ({"target_layers": None}, "its file does not name the 3 layers that it reads"),
    ],
    ids=["width", "vocabulary", "layers"],
)
def test_the_eagle3_head_of_another_model_is_refused(
    changed: Metadata, reason: str, lab: EngineLab, smollm2: Path, tmp_path: Path
) -> None:
    head = stepping_models.write_eagle3(lab, metadata=changed).path
    home = ("--home", str(tmp_path / "home"), "--port", "0")
    found = mesh_llm(*home, "--model", str(smollm2), "--draft", str(head))
    assert found.status == 1
    assert f"Error: {head.stem} cannot draft for SmolLM2-135M-Instruct.Q4_1: " in found.stderr
    assert reason in found.stderr
    assert "Hint: choose the EAGLE3 head that was made for this model, or use --no-draft" in found.stderr


# -- vocabularies ----------------------------------------------------------------------------------


async def test_vocabularies_are_compared(smollm2: Path, tmp_path: Path) -> None:
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", vocabulary=512)
    near = tiny_gguf.write(tmp_path / "near.gguf", "llama", vocabulary=520)
    assert await vocabularies_differ(smollm2, smollm2) is None
    assert await vocabularies_differ(other, near) is None
    reason = await vocabularies_differ(smollm2, other)
    assert reason is not None
    assert "tokens instead of" in reason or "another" in reason


# -- the command -----------------------------------------------------------------------------------


def test_a_draft_that_does_not_fit_is_refused(smollm2: Path, tmp_path: Path) -> None:
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", vocabulary=512)
    found = mesh_llm(
        "--home", str(tmp_path / "home"), "--port", "0", "--model", str(smollm2), "--draft", str(other)
    )
    assert found.status == 1
    assert "Error: other cannot draft for SmolLM2-135M-Instruct.Q4_1: it " in found.stderr
    assert "Hint: choose a small model of the same family" in found.stderr


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--draft", "no-such-model"), 1, "no-such-model"),
        (("--draft", "x.gguf", "--no-draft"), 2, "--no-draft disables speculative decoding"),
        (("--draft-max", "0"), 2, "--draft-max 0 is not between 1 and"),
        (("--draft", ""), 2, "--draft is empty"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], code: int, sentence: str
) -> None:
    found = mesh_llm("--home", str(tmp_path / "home"), "--port", "0", *options)
    assert found.status == code
    assert sentence in found.stderr


def draft_of_plan(smollm2: Path, home: Path, *options: str) -> tuple[Any, int]:
    ended = mesh_llm("plan", "--home", home, "--model", smollm2, "--ctx-size", "512", "--json", *options)
    assert ended.status == 0, ended.stderr
    document = json.loads(ended.stdout)
    return document["model"]["draft"], document["plan"]["need_bytes"]


def test_a_plan_counts_the_draft(smollm2: Path, tmp_path: Path) -> None:
    """Alone, and beside a running node whose mesh has none."""
    with temporary_home() as home, NodeProcess(*SMALL, "--no-draft", home=home, model=smollm2) as node:
        node.until_ready()
        for where in (tmp_path / "home", home):
            none, plain_bytes = draft_of_plan(smollm2, where, "--no-draft")
            draft, need_bytes = draft_of_plan(smollm2, where, "--draft", str(smollm2))
            assert none is None
            assert (draft["name"], draft["fits"]) == (smollm2.stem, True)
            assert need_bytes > plain_bytes + draft["weight_bytes"] > 50_000_000
            # Options that come to nothing say so.
            told = mesh_llm("plan", "--home", where, "--model", smollm2, "--draft-max", "3")
            assert "note     --draft-max has no effect: " in told.stdout
        # As `load` does for a model that is given a draft, whatever the node was started with.
        another = tiny_gguf.write(tmp_path / "another.gguf", "llama", tokenizer=smollm2)
        assert draft_of_plan(another, home, "--draft", str(smollm2))[0]["name"] == smollm2.stem
    # Where the model alone fits, it runs alone.
    limit = f"{(plain_bytes + need_bytes) // 2_000_000}MB"
    draft, without_bytes = draft_of_plan(
        smollm2, tmp_path / "home", "--draft", str(smollm2), "--max-memory", limit
    )
    assert (draft["fits"], without_bytes < need_bytes) == (False, True)
