"""Fewer faults that cause the same failure: delta debugging, bounded in runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from mesh_llm.lab.chaos.schedule import Fault

Fails = Callable[[Sequence[Fault]], Awaitable[bool]]
"""Runs with these faults alone: whether it fails as before."""


async def shrunk(faults: Sequence[Fault], fails: Fails, *, runs: int) -> tuple[Fault, ...]:
    """A part of `faults` that still fails, after at most so many runs.

    Parts are tried, then all but a part, then smaller parts. What no run has failed with is not left out.
    """
    kept, parts, left = tuple(faults), 2, runs
    while len(kept) > 1 and left > 0:
        for candidate in _candidates(kept, parts):
            if left <= 0:
                return kept
            left -= 1
            if await fails(candidate):
                kept, parts = candidate, max(2, parts - 1) if len(candidate) > len(kept) // parts else 2
                break
        else:
            if parts >= len(kept):
                break
            parts = min(len(kept), 2 * parts)
    return kept


def _candidates(faults: tuple[Fault, ...], parts: int) -> list[tuple[Fault, ...]]:
    edges = [index * len(faults) // parts for index in range(parts + 1)]
    spans = list(pairwise(edges))
    alone = [faults[first:last] for first, last in spans]
    others = [faults[:first] + faults[last:] for first, last in spans] if parts > 2 else []
    return [each for each in (*alone, *others) if each and len(each) < len(faults)]
