"""Figures from what a simulation saw. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import ceil, log

from mesh_llm.frozen import frozen


@frozen
class Rate:
    """For each node and second."""

    messages: float
    bytes: float


def per_node_second(messages: int, size_bytes: float, nodes: int, seconds: float) -> Rate:
    share = max(1, nodes) * max(seconds, 1e-9)
    return Rate(messages=messages / share, bytes=size_bytes / share)


def quantile(values: Collection[float], part: float) -> float:
    """The least value that at least this part of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(part * len(ordered)) - 1)] if ordered else 0.0


def mistaken(seen: Iterable[Collection[str]], truth: Collection[str]) -> float:
    """Members that a view takes for present and are not, or the other way round: on average over views."""
    views = [set(view) for view in seen]
    real = set(truth)
    return sum(len(view ^ real) for view in views) / len(views) if views else 0.0


def growth(nodes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the number of nodes with which a value grows between the first and the last: 0 is flat,
    1 is linear."""
    if len(nodes) < 2 or nodes[0] == nodes[-1] or min(values[0], values[-1]) <= 0:
        return 0.0
    return log(values[-1] / values[0]) / log(nodes[-1] / nodes[0])
