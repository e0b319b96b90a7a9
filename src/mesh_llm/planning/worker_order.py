"""The order of workers: a token goes from the host through all of them and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.types import NodeId

_PASSES = 8
"""Over a whole route, each with the square of its length in changes to try; most need two or three."""
_ALL_STARTS = 16
"""Stops up to which a route is looked for from each of them."""
_LEAST_S = 1e-9
"""Less is rounding."""

Costs = list[list[float]]
"""Seconds between stops, which are counted from the host on."""


def arrange(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> tuple[NodeId, ...]:
    """Workers so that neighbours are close; a short way round is enough, the shortest would take too long."""
    key = (host, frozenset(workers), quick)
    if key not in inputs.routes:
        stops = (host, *sorted(workers))
        costs = [[_hop_s(inputs, a, b, host) for b in stops] for a in stops]
        route = _nearest_first(costs, 0) if quick else _shortest(costs)
        inputs.routes[key] = tuple(stops[stop] for stop in route[1:])
    return inputs.routes[key]


def _hop_s(inputs: PlanInputs, a: NodeId, b: NodeId, host: NodeId) -> float:
    if a == b:
        return 0.0
    way = inputs.way(a, b, host)
    return way.delay_s + way.overhead_s


def _shortest(costs: Costs) -> list[int]:
    """The best of those found from each possible first stop, or of a long route from the nearest."""
    starts = range(1, len(costs)) if len(costs) <= _ALL_STARTS else (0,)
    routes = [_improved(costs, _nearest_first(costs, start)) for start in starts]
    return min(routes, key=lambda route: (_trip_s(costs, route), route), default=[0])


def _improved(costs: Costs, route: list[int]) -> list[int]:
    for _ in range(_PASSES):
        if not (_turned(costs, route) | _moved(costs, route)):
            break
    return route


def _trip_s(costs: Costs, route: list[int]) -> float:
    # Rounded: a way there and the same way back are equally long.
    return round(sum(costs[a][b] for a, b in pairwise((*route, 0))), 9)


def _nearest_first(costs: Costs, start: int) -> list[int]:
    """Always to the nearest stop that is left, after a first one that is given unless it is the host."""
    route = [0, start] if start else [0]
    left = set(range(1, len(costs))) - {start}
    while left:
        here = costs[route[-1]]
        nearest = min(left, key=lambda stop: (here[stop], stop))
        left.remove(nearest)
        route.append(nearest)
    return route


def _turned(costs: Costs, route: list[int]) -> bool:
    """Turns parts of the route round where that makes it shorter; whether it did."""
    found = False
    for first in range(1, len(route) - 1):
        for last in range(first + 1, len(route)):
            before, start, end = route[first - 1], route[first], route[last]
            after = route[(last + 1) % len(route)]
            gain = costs[before][start] + costs[end][after] - costs[before][end] - costs[start][after]
            if gain > _LEAST_S:
                route[first : last + 1] = route[first : last + 1][::-1]
                found = True
    return found


def _moved(costs: Costs, route: list[int]) -> bool:
    """Moves single stops to where they cost least; whether it did."""
    found = False
    for stop in range(1, len(costs)):
        place = route.index(stop)
        rest = route[:place] + route[place + 1 :]

        def added(index: int, stop: int = stop, rest: list[int] = rest) -> float:
            before, after = rest[index - 1], rest[index % len(rest)]
            return costs[before][stop] + costs[stop][after] - costs[before][after]

        best = min(range(1, len(rest) + 1), key=added)
        if added(place) - added(best) > _LEAST_S:
            rest.insert(best, stop)
            route[:] = rest
            found = True
    return found
