"""Sides of the split benches: what they showed, and models that are made for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.report import Side
from mesh_llm.bench.client import TimedAnswer
from mesh_llm.bench.sides import Seen
from mesh_llm.results.samples import Sample
from tests.support import tiny_gguf


def write_synthetic(path: Path, quantisation: str, *, layers: int = 6) -> None:
    """A llama with random weights, its layers as wide as those of a model with half a billion parameters."""
    sizes: Any = {"feed_forward": 2816, "heads": 16, "kv_heads": 4, "head_size": 64}
    tiny_gguf.write(path, "llama", layers=layers, hidden=1024, quantisation=quantisation, **sizes)


def side_of(
    name: str, answers: Sequence[TimedAnswer], figure: Callable[[TimedAnswer], float], unit: str
) -> Side:
    return Side(name=name, sample=Sample.of([figure(answer) for answer in answers]), unit=unit)


def speeds(seen: Seen, figure: Callable[[TimedAnswer], float], *names: str) -> tuple[Side, Side]:
    ours, theirs = (side_of(name, seen[name], figure, "tok/s") for name in names)
    return ours, theirs
