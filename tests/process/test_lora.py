"""LoRA adapters over workers as alone, bit by bit; of their weights nothing crosses a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.spec import AdapterSpec
from tests.support import tiny_gguf
from tests.support.architectures import MODELS
from tests.support.engine_lab import EngineLab, completion
from tests.support.sampling import sampled
from tests.support.split import token_ids

MORE = 4


def asked(*scales: float) -> dict[str, Any]:
    """With these scales, for this request alone."""
    chosen = [{"id": index, "scale": scale} for index, scale in enumerate(scales)]
    return completion(token_ids(17, seed=1), 3, lora=chosen)


def adapter(
    path: Path, model: Path, among: tuple[str, ...], seed: int, scale: float, quantisation: str
) -> AdapterSpec:
    tiny_gguf.write_adapter(path, model, among=among, rank=32, seed=seed, quantisation=quantisation)
    return AdapterSpec(path=str(path), scale=scale, digest=f"{seed}" * 64)


@pytest.mark.parametrize("quantisation", sampled(["F32", "Q8_0"], "Q8_0"))
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma3"])
def test_over_workers_as_alone(architecture: str, quantisation: str, lab: EngineLab, tmp_path: Path) -> None:
    """Three adapters: the second has the names and sizes of the first, and the third few layers."""
    tiny = lab.write(architecture, MODELS[architecture])
    wide, narrow = ("attn_q.weight", "ffn_down", "output.weight"), ("blk.0.attn_v", "blk.3.attn_v")
    made = tuple(
        adapter(tmp_path / f"{seed}.gguf", tiny.path, names, seed, scale, quantisation)
        for seed, scale, names in [(1, 1.0, wide), (2, 0.5, wide), (3, 2.0, narrow)]
    )
    requests = [
        completion(token_ids(1), 1),
        completion(token_ids(1), 1 + MORE),
        completion(token_ids(17, seed=1), 3),
        asked(1.0, 0.0, 0.0),
        asked(0.0, 1.0, 0.0),
        asked(0.0, 0.0, 1.0),
        asked(0.0, 0.0, 0.0),
    ]
    alone = lab.answers(tiny, requests, adapters=made)
    bare = lab.answers(tiny, [requests[2]])
    assert alone.said[-1] == bare.said[0]
    assert len(set(map(str, alone.said))) == len(requests)
    # By reference: the model and the adapters, of which the third has nothing for the last two layers.
    for cut, attached in (((2, 2), 7), ((3, 3), 8)):
        split = lab.answers(tiny, requests, *cut, adapters=made)
        assert split.said == alone.said
        assert (split.frames["ATTACH"], split.frames["SET"]) == (attached, 0)
        hops, runs = split.costs[1].per_token(split.costs[0], MORE)
        assert hops == len(cut) + 1
        assert set(runs.values()) == {1}
