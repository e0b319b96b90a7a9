"""Experts in main memory beside a worker's GPU: the same text, no more hops, and a quota of their own.

Both devices are the CPU here; what crosses between them is copied as for a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.defaults import EXPERTS
from mesh_llm.engine.spec import MainMemorySpec
from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import SplitPlan, worker_spec
from tests.support import tiny_gguf
from tests.support.architectures import CUTS, EXCEPTIONS, MODELS, OMITTED
from tests.support.engine_lab import EngineLab, completion
from tests.support.sampling import sampled
from tests.support.split import lenders, over, plan_for, token_ids

LAYERS = 4
REQUESTS = [
    completion(token_ids(1), 1),
    completion(token_ids(1), 5),
    completion(token_ids(600, seed=2), 3),
]
MIXTURES = [name for name, metadata in MODELS.items() if metadata.get("expert_count") and name not in CUTS]
EVERYTHING = "."


@pytest.mark.parametrize("architecture", sampled(MIXTURES, "qwen3moe", "gpt-oss", "deepseek2"))
def test_same_text_in_as_many_hops(architecture: str, lab: EngineLab) -> None:
    check(architecture, EXPERTS, lab)


@pytest.mark.parametrize("architecture", sampled(list(MODELS), "qwen3moe", "jamba", "rwkv7"))
def test_any_weight_can_lie_there(architecture: str, lab: EngineLab) -> None:
    check(architecture, EVERYTHING, lab)


def check(architecture: str, pattern: str, lab: EngineLab) -> None:
    tiny = lab.write(architecture, MODELS[architecture], omitted=OMITTED.get(architecture, ()))
    cut = CUTS.get(architecture, (2, 2))
    # Several runs for a token leave something to each other.
    poison = architecture not in EXCEPTIONS
    plain = lab.answers(tiny, REQUESTS, *cut, poison=poison)
    kept = lab.answers(tiny, REQUESTS, *cut, poison=poison, in_main_memory=pattern)
    assert kept.said == plain.said
    assert kept.costs == plain.costs


def test_a_host_keeps_those_of_its_own_layers(lab: EngineLab) -> None:
    """As the engine's own option has it; what is a worker's stays there."""
    tiny = lab.write("qwen3moe", MODELS["qwen3moe"])
    first_two = rf"^(?!(?!blk\.(0|1)\.)).*((?:{EXPERTS}))"
    alone = lab.answers(tiny, REQUESTS, overrides=(first_two,))
    plain, kept = lab.answers(tiny, REQUESTS, 2, 2), lab.answers(tiny, REQUESTS, 2, 2, overrides=(first_two,))
    assert kept.said == alone.said == plain.said
    assert kept.costs == plain.costs


@pytest.fixture
async def plan(libraries: dict[str, Path], tmp_path: Path) -> SplitPlan:
    model = tiny_gguf.write(tmp_path / "model.gguf", "qwen3moe", layers=LAYERS)
    return over(await plan_for(model, libraries, settings={"n_ctx_checkpoints": 0}), LAYERS)


@pytest.mark.full
async def test_counts_against_main_memory(plan: SplitPlan, tmp_path: Path) -> None:
    """A device that holds all but the experts of three layers, whose first two are in main memory."""
    layers = plan.facts.layers
    expert_bytes = layers[0].expert_bytes
    assert 2 * expert_bytes > layers[0].weight_bytes
    dense = sum(layer.weight_bytes for layer in layers) - LAYERS * expert_bytes
    kept = MainMemorySpec(pattern=EXPERTS, layers=2, quota_bytes=2 * expert_bytes)
    spec = replace(worker_spec(plan, tmp_path / "worker.sock"), main_memory=kept)

    async def resident(quota_bytes: int, layers: tuple[int, int]) -> int:
        async with lenders(replace(spec, quota_bytes=quota_bytes)) as (worker,):
            return await worker.prepare(plan.facts.fingerprint, layers, lambda *_: None)

    assert await resident(dense + 2 * expert_bytes, (0, LAYERS)) == dense + LAYERS * expert_bytes
    # Counted from the first layer that is asked for.
    assert await resident(dense, (2, LAYERS)) == dense // 2 + 2 * expert_bytes
    with pytest.raises(EngineFailed, match=r"no room for .* of weights \("):
        await resident(dense, (0, LAYERS))
    spec = replace(spec, main_memory=replace(kept, quota_bytes=expert_bytes))
    with pytest.raises(EngineFailed, match=r"no room for .* of weights in main memory"):
        await resident(2 * dense + 2 * expert_bytes, (0, LAYERS))
