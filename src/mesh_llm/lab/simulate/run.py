"""What a simulation goes through, by the numbers of nodes that were asked for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.days import day_case
from mesh_llm.lab.simulate.modelled import modelled_case
from mesh_llm.lab.simulate.planning_cases import SIZES, plan_quality, planning_time
from mesh_llm.lab.simulate.report import Findings
from mesh_llm.lab.simulate.whole_views import whole_case
from mesh_llm.membership.gossip import sync_s

WHOLE_MOST = 1000
"""Nodes of which each has a whole view: half a gigabyte, and a second of CPU time for each that is simulated.
Beyond it a hundred of them have one."""
VIEWS = 100
PLANNED = (3, 10, 30, 100, 300, 1000, 3000, 10_000)
"""Numbers of nodes that planning is timed with, as far as the largest mesh that was asked for."""


@frozen
class SimulationSize:
    nodes: tuple[int, ...]
    churn_s: float
    cases: int
    """Small meshes whose plan is compared with the best."""
    events: int
    """For each mesh whose plans are followed over hours."""
    rounds: int = 5
    views: int = VIEWS


def simulated(seed: int, extent: SimulationSize, say: Callable[[str], None]) -> Findings:
    largest = max(extent.nodes)
    counts = [count for count in PLANNED if count <= largest]
    with _no_collector():
        say("planning time")
        times = tuple(
            planning_time(seed, count, size, rounds=extent.rounds, clock=time.process_time)
            for size in SIZES
            for count in counts
        )
        say(f"{extent.cases} small meshes against the best of all plans")
        qualities = tuple(plan_quality(seed * 1000 + case) for case in range(extent.cases))
        whole = tuple(
            whole_case(seed, count, churn_s=extent.churn_s, say=say)
            for count in extent.nodes
            if count <= WHOLE_MOST
        )
        modelled = tuple(
            modelled_case(seed, count, views=extent.views, churn_s=_modelled_s(extent, count), say=say)
            for count in _modelled(extent.nodes)
        )
        say("plans and waits over hours")
        days = tuple(
            (size.name, day_case(seed, count, size, hours=24, most_events=_events(extent, count)))
            for size in SIZES
            for count in extent.nodes
        )
    return Findings(times=times, qualities=qualities, whole=whole, modelled=modelled, days=days)


def _modelled(nodes: Sequence[int]) -> list[int]:
    """Those beyond whole views, and the largest with whole views, so that both can be compared."""
    beyond = [count for count in nodes if count > WHOLE_MOST]
    within = [count for count in nodes if count <= WHOLE_MOST]
    return [max(within), *beyond] if beyond and within else beyond


def _modelled_s(extent: SimulationSize, count: int) -> float:
    """Long enough for every two neighbours to compare their tables once."""
    return max(extent.churn_s, sync_s(count))


def _events(extent: SimulationSize, count: int) -> int:
    return max(10, extent.events * min(1000, 1_000_000 // count) // 1000)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of objects live until the end: looking for cycles among them would take most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
