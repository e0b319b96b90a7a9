"""Models that see answer over workers as alone, bit by bit; a step with a picture takes N + 1 hops, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.spec import StatesSpec
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.architectures import HIDDEN, MODELS, Metadata
from tests.support.engine_lab import IMAGE, EngineLab, Tiny, completion, seeing
from tests.support.pictures import png

SEERS: dict[str, tuple[str, Metadata]] = {
    "llama": ("mlp", {}),
    # The parts of a picture see each other.
    "gemma3": ("gemma3", {}),
    # Positions have three dimensions.
    "qwen2vl": ("qwen2vl_merger", {}),
    # Parts of a picture go to the first layers, too.
    "qwen3vl": ("qwen3vl_merger", {"n_deepstack_layers": 2}),
}
MORE = 4
SIDE = 64


def seer(lab: EngineLab, folder: Path, architecture: str) -> tuple[Tiny, dict[str, Any]]:
    """A model, and what an engine over it is told beside it."""
    kind, metadata = SEERS[architecture]
    projector = tiny_gguf.write_projector(folder / "mmproj.gguf", kind, hidden=HIDDEN, image=SIDE)
    tiny = lab.write(architecture, MODELS[architecture] | metadata)
    return tiny, {"mmproj": str(projector)}


@pytest.mark.parametrize("cut", [(2, 2), pytest.param((3, 3), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("architecture", SEERS)
def test_over_workers_as_alone(
    architecture: str, cut: tuple[int, ...], lab: EngineLab, tmp_path: Path
) -> None:
    tiny, fields = seer(lab, tmp_path, architecture)
    black, red, other = png(0, side=SIDE), png(255, side=SIDE), png(99, side=SIDE)
    requests = [
        seeing(f"what is {IMAGE}?", [black], 1),
        seeing(f"what is {IMAGE}?", [black], 1 + MORE),
        seeing(f"what is {IMAGE}?", [red], 3),
        seeing(f"{IMAGE} and {IMAGE}?", [black, other], 3),
        completion([5, 6, 7], 3),
    ]
    settings: dict[str, Setting] = {"warmup": False}
    alone = lab.answers(tiny, requests, settings=settings, **fields)
    split = lab.answers(tiny, requests, *cut, settings=settings, **fields)
    assert split.said == alone.said
    assert len(set(map(str, alone.said))) == len(requests)
    first = split.costs[0]
    # The text before the picture, the picture, and the text behind it, which alone is waited for.
    assert first.hops == len(cut) + 1
    assert set(first.runs.values()) == {3}
    hops, runs = split.costs[1].per_token(first, MORE)
    assert hops == len(cut) + 1
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2vl"])
def test_a_conversation_with_a_picture_is_remembered(
    architecture: str, lab: EngineLab, tmp_path: Path
) -> None:
    """In its slot, and where another one had its slot meanwhile."""
    tiny, fields = seer(lab, tmp_path, architecture)
    black, red = [png(0, side=SIDE)], [png(255, side=SIDE)]
    question = f"what is this picture? {IMAGE} tell me all that you see in it"
    kept = {"cache_prompt": True}
    requests = [
        seeing(question, black, 4, **kept),
        seeing(f"{question}, please", black, 4, **kept),
        seeing(question, red, 4, **kept),
        seeing(f"something else altogether: {IMAGE} what is it?", red, 4, **kept),
        seeing(f"{question}, please, once more", black, 4, **kept),
    ]
    settings: dict[str, Setting] = {"warmup": False, "n_ctx_checkpoints": 4, "cache_ram_mib": -1}
    settings["cache_idle_slots"] = False
    alone = lab.answers(tiny, requests, settings=settings, **fields)
    split = lab.answers(tiny, requests, 2, 2, settings=settings, states=StatesSpec(checkpoints=4), **fields)
    assert split.said == alone.said
    reused = [cached for *_, cached in alone.said]
    assert min(reused[1], reused[4]) > 60
    assert reused[3] == 0
