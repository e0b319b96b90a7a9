"""Exactness: an engine over workers answers as the same engine does alone.

Same wheel, same libraries, one thread each, temperature 0. Tokens have to be
the same, and so has every bit of the log-probabilities: a CPU worker runs the
same kernels. Where the layout of weights makes the engine choose other
kernels, the engine alone is told to choose those, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.lab.split import SplitPlan
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.sampling import sampled
from tests.support.split import Answer, Client, client, over, plan_for, token_ids

LAYERS = 6
SMALL_BATCHES: dict[str, Setting] = {"n_batch": 64, "n_ubatch": 32, "n_ctx_checkpoints": 0}
"""Prompts take several batches, and these several micro-batches. An engine alone would also save states."""
FLASH_OFF, FLASH_ON = 0, 1

SAMPLE = ((6,), (2, 1, 2))
MATRIX = ((4,), (3, 3), (2, 2), (2, 2, 2), (1, 1, 1, 1, 1), (1, 1, 1, 1, 2))

Talk = dict[str, Answer]


def tiny(folder: Path, architecture: str, **fields: Any) -> Path:
    return tiny_gguf.write(folder / f"{architecture}.gguf", architecture, **({"layers": LAYERS} | fields))


async def talk(client: Client) -> Talk:
    """Prompts shorter and longer than a batch, one across 256 cells of the cache, one that goes on."""
    once = {"n_predict": 10, "cache_prompt": False, "ignore_eos": True}
    answers = {
        "short": await client.complete(token_ids(5), **once),
        "one token": await client.complete(token_ids(1, seed=4), **once),
        "longer than a batch": await client.complete(token_ids(150, seed=1), **once),
        "across 256": await client.complete(token_ids(250, seed=2), **once),
    }
    first = await client.complete(token_ids(40, seed=3), n_predict=8, ignore_eos=True)
    more = [*token_ids(40, seed=3), *first.tokens, *token_ids(30, seed=5)]
    return answers | {"first": first, "goes on": await client.complete(more, n_predict=8, ignore_eos=True)}


def assert_same(expected: Talk, found: Talk) -> None:
    """First what people see, then every bit."""
    for name, answer in expected.items():
        assert found[name].tokens == answer.tokens, name
        assert found[name] == answer, (
            f"{name}: log-probabilities differ by up to {worst(answer, found[name])}"
        )


def worst(one: Answer, other: Answer) -> float:
    """The largest difference between log-probabilities of the same token at the same place."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    known = [(dict(a), dict(b)) for a, b in pairs]
    return max(abs(a[token] - b[token]) for a, b in known for token in a.keys() & b.keys())


async def compare(alone: SplitPlan, splits: Iterable[SplitPlan], ask: Callable[[Client], Any] = talk) -> Any:
    """What the engine alone answers; engines over workers have to answer the same."""
    async with client(alone) as asking:
        expected = await ask(asking)
    for plan in splits:
        async with client(plan) as asking:
            found = await ask(asking)
        if isinstance(expected, dict):
            assert_same(expected, found)
        else:
            assert found == expected
    return expected


# -- architectures, workers, cuts ------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sampled(tiny_gguf.ARCHITECTURES, "llama", "gemma3"))
async def test_architecture(architecture: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    model = tiny(tmp_path, architecture)
    alone = await plan_for(model, libraries, settings=SMALL_BATCHES)
    answers = await compare(alone, [over(alone, *layers) for layers in SAMPLE])
    # A model that always says the same would hide every fault.
    assert len({token for answer in answers.values() for token in answer.tokens}) > 3


@pytest.mark.long
@pytest.mark.parametrize("ways", [{}, {"push": False}, {"by_reference": False}], ids=str)
@pytest.mark.parametrize("architecture", tiny_gguf.ARCHITECTURES)
async def test_architecture_in_every_way(
    architecture: str, ways: dict[str, bool], libraries: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny(tmp_path, architecture)
    alone = await plan_for(model, libraries, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, *layers, **ways) for layers in MATRIX])


@pytest.mark.full
async def test_every_cut(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan_for(tiny(tmp_path, "llama"), libraries, settings=SMALL_BATCHES)
    with_host = [over(alone, count) for count in range(1, LAYERS + 1)]
    between_two = [over(alone, count, LAYERS - count) for count in range(1, LAYERS)]
    await compare(alone, [*with_host, *between_two])


async def test_smollm2(smollm2: Path, libraries: dict[str, Path]) -> None:
    alone = await plan_for(smollm2, libraries, settings={"n_ctx_checkpoints": 0})

    async def ask(client: Client) -> Talk:
        sky = await client.complete("The sky is blue because", n_predict=16, cache_prompt=False)
        return {"sky": sky, "long": await client.complete(token_ids(130), n_predict=8, ignore_eos=True)}

    await compare(alone, [over(alone, 10, 10, 10)], ask)


# -- links and weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ways", [{"push": False}, {"by_reference": False}, {"push": False, "by_reference": False}], ids=str
)
async def test_relayed_by_the_host_and_weights_sent(
    ways: dict[str, bool], libraries: dict[str, Path], tmp_path: Path
) -> None:
    alone = await plan_for(tiny(tmp_path, "gemma3"), libraries, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, 2, 1, 2, **ways)])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
async def test_the_head_on_the_last_worker(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Of its own, or tied to the embedding."""
    alone = await plan_for(tiny(tmp_path, architecture), libraries, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, 2, 2, head_on_worker=True), over(alone, 6, head_on_worker=True)])


async def test_links_that_take_time(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan_for(tiny(tmp_path, "llama"), libraries, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, 2, 1, 2, delay_s=0.003)])


@pytest.mark.parametrize("quantisation", sampled(["Q4_0", "Q8_0", "F16"], "Q4_0"))
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
async def test_weights_in_the_layout_that_the_engine_chooses(
    architecture: str, quantisation: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Repacked for this CPU on both sides: by reference, since bytes that are sent stay as they are."""
    model = tiny(tmp_path, architecture, quantisation=quantisation)
    alone = await plan_for(model, libraries, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, 6), over(alone, 2, 2)])


@pytest.mark.parametrize("quantisation", sampled(["Q4_0", "Q8_0"], "Q4_0"))
async def test_weights_sent_are_multiplied_as_they_are(
    quantisation: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny(tmp_path, "llama", quantisation=quantisation)
    plain = await plan_for(model, libraries, settings=SMALL_BATCHES | {"no_extra_bufts": True})
    await compare(plain, [over(plain, 6, by_reference=False), over(plain, 2, 2, by_reference=False)])


async def test_a_model_in_several_files(libraries: dict[str, Path], tmp_path: Path) -> None:
    paths = tiny_gguf.write_shards(tmp_path / "llama.gguf", 3, "llama", layers=LAYERS)
    alone = await plan_for(paths[0], libraries, settings=SMALL_BATCHES)
    assert alone.facts.files == tuple(paths)
    await compare(alone, [over(alone, 2, 2)])


# -- what the engine does with its cache --------------------------------------------------------------


@pytest.mark.full
async def test_several_slots_at_once(libraries: dict[str, Path], tmp_path: Path) -> None:
    plan = await plan_for(tiny(tmp_path, "llama"), libraries, slots=3, settings=SMALL_BATCHES)

    async def ask(client: Client) -> list[list[Answer]]:
        options = {"n_predict": 12, "ignore_eos": True}
        return [
            await client.complete_all([token_ids(n, seed=n + turn) for n in (5, 90, 40)], **options)
            for turn in range(3)
        ]

    await compare(plan, [over(plan, 6), over(plan, 2, 1, 2), over(plan, 2, 2, push=False)], ask)


@pytest.mark.parametrize("architecture", sampled(tiny_gguf.ARCHITECTURES, "llama", "gemma3", "lfm2"))
async def test_context_shift(architecture: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    settings = SMALL_BATCHES | {"ctx_shift": True, "swa_full": True}
    alone = await plan_for(tiny(tmp_path, architecture), libraries, context=256, settings=settings)

    async def ask(client: Client) -> Talk:
        return {"shifted": await client.complete(token_ids(200), n_predict=100, ignore_eos=True)}

    answers = await compare(alone, [over(alone, 6), over(alone, 2, 1, 2)], ask)
    if not answers["shifted"].truncated:
        pytest.skip(f"llama.cpp does not shift the context of {architecture}")
    assert len(answers["shifted"].tokens) == 100


async def test_a_cached_piece_in_another_place(libraries: dict[str, Path], tmp_path: Path) -> None:
    settings = SMALL_BATCHES | {"n_cache_reuse": 16}
    alone = await plan_for(tiny(tmp_path, "llama"), libraries, settings=settings)
    head, middle, tail = token_ids(30, seed=1), token_ids(30, seed=2), token_ids(60, seed=3)

    async def ask(client: Client) -> Talk:
        whole = await client.complete([*head, *middle, *tail], n_predict=4, ignore_eos=True)
        return {"whole": whole, "cut": await client.complete([*head, *tail], n_predict=8, ignore_eos=True)}

    answers = await compare(alone, [over(alone, 6), over(alone, 2, 1, 2)], ask)
    assert answers["cut"].cached > len(head) + 16


@pytest.mark.parametrize("cache_type", ["q8_0", pytest.param("q4_0", marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", sampled(["llama", "gemma3", "gpt-oss"], "llama"))
async def test_quantised_cache(
    architecture: str, cache_type: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny(tmp_path, architecture)
    alone = await plan_for(model, libraries, cache_type=cache_type, settings=SMALL_BATCHES)
    await compare(alone, [over(alone, 6), over(alone, 2, 1, 2)])


@pytest.mark.parametrize("architecture", sampled(tiny_gguf.ARCHITECTURES, "llama"))
async def test_without_flash_attention(architecture: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    settings = SMALL_BATCHES | {"flash_attn_type": FLASH_OFF}
    alone = await plan_for(tiny(tmp_path, architecture), libraries, settings=settings)
    await compare(alone, [over(alone, 6), over(alone, 2, 1, 2)])


@pytest.mark.long
@pytest.mark.parametrize("flash", [FLASH_OFF, FLASH_ON])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
async def test_across_512_cells(
    architecture: str, flash: int, libraries: dict[str, Path], tmp_path: Path
) -> None:
    settings = SMALL_BATCHES | {"flash_attn_type": flash}
    alone = await plan_for(tiny(tmp_path, architecture), libraries, context=1024, settings=settings)

    async def ask(client: Client) -> Talk:
        return {"across": await client.complete(token_ids(505), n_predict=16, ignore_eos=True)}

    await compare(alone, [over(alone, 6), over(alone, 2, 1, 2), over(alone, 2, 2, push=False)], ask)


@pytest.mark.full
async def test_more_graphs_than_a_worker_keeps(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Each length of a prompt is a graph of its own: old ones are forgotten by both sides alike."""
    alone = await plan_for(tiny(tmp_path, "llama"), libraries, settings={"n_ctx_checkpoints": 0})

    async def ask(client: Client) -> list[Answer]:
        lengths = [*range(2, 82), *range(2, 10), 81]
        once = {"n_predict": 3, "cache_prompt": False, "ignore_eos": True}
        return [await client.complete(token_ids(n), **once) for n in lengths]

    await compare(alone, [over(alone, 3, 2)], ask)


# -- embeddings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", sampled(["none", "mean", "last"], "mean"))
async def test_embeddings(pooling: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    kinds = {"none": 0, "mean": 1, "last": 3}
    settings = SMALL_BATCHES | {"pooling_type": kinds[pooling], "n_ubatch": 64}
    model = tiny(tmp_path, "qwen3")
    alone = await plan_for(model, libraries, embeddings=True, settings=settings)

    async def ask(client: Client) -> Any:
        texts = ["a short text", "another one, which is somewhat longer than the first"]
        status, document = await client.post("/embedding", {"content": texts})
        assert status == 200, document
        return document

    documents = await compare(alone, [over(alone, 6), over(alone, 2, 1, 2)], ask)
    assert len(documents) == 2
    assert documents[0]["embedding"] != documents[1]["embedding"]


async def test_what_this_compares_can_differ(libraries: dict[str, Path], tmp_path: Path) -> None:
    """One weight of one layer that differs shows: equality above is no accident of the comparison."""
    alone = await plan_for(tiny(tmp_path, "llama"), libraries, settings=SMALL_BATCHES)
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", layers=LAYERS, seed=1)
    changed = replace(alone, facts=(await plan_for(other, libraries)).facts)
    with pytest.raises(AssertionError):
        await compare(alone, [over(changed, 6)])
