"""The order of workers: a token goes from the host through all of them and back. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from mesh_llm.planning.ground import Ground
from mesh_llm.types import NodeId

LONG_ROUTE = 12
"""Longer ones stay as they are found: to try their changes takes the cube of their length."""


def arrange(
    ground: Ground, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> tuple[NodeId, ...]:
    """Workers so that neighbours are close; a short way round is enough, the shortest would take too long."""
    route = _nearest_first(ground, host, workers)
    if not quick and 3 <= len(workers) <= LONG_ROUTE:
        route = _shortened(ground, route)
    return tuple(route[1:])


def _nearest_first(ground: Ground, host: NodeId, workers: Sequence[NodeId]) -> list[NodeId]:
    left, route = sorted(workers), [host]
    while left:
        nearest = min(left, key=lambda node: (_hop_s(ground, route[-1], node, host), node))
        left.remove(nearest)
        route.append(nearest)
    return route


def _shortened(ground: Ground, route: list[NodeId]) -> list[NodeId]:
    best, better = _trip_s(ground, route), True
    while better:
        better = False
        for other in _changes(route):
            time = _trip_s(ground, other)
            if time < best * (1 - 1e-9):
                route, best, better = other, time, True
                break
    return route


def _changes(route: list[NodeId]) -> Iterator[list[NodeId]]:
    """A part of it turned round, or moved elsewhere."""
    for first in range(1, len(route)):
        for last in range(first + 1, len(route) + 1):
            part, rest = route[first:last], route[:first] + route[last:]
            yield route[:first] + part[::-1] + route[last:]
            if len(part) <= 2:
                for place in range(1, len(rest) + 1):
                    yield rest[:place] + part + rest[place:]


def _trip_s(ground: Ground, route: Sequence[NodeId]) -> float:
    return sum(_hop_s(ground, a, b, route[0]) for a, b in pairwise((*route, route[0])))


def _hop_s(ground: Ground, a: NodeId, b: NodeId, host: NodeId) -> float:
    way = ground.way(a, b, host)
    return way.delay_s + way.overhead_s
