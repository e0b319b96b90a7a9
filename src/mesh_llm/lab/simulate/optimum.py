"""The fastest of all plans there could be, for small meshes: every host, every order of every set of workers,
every cut. What planning finds quickly is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from mesh_llm.frozen import frozen
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.memory_layout import Ledger, lodge
from mesh_llm.planning.placement import Layout, seconds_of
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.predict import stage_seconds
from mesh_llm.types import NodeId, Place


@frozen
class Best:
    seconds: float
    """Between two tokens."""
    layout: Layout


def optimum(inputs: PlanInputs) -> dict[NodeId, Best]:
    """By host, the fastest first; empty where no plan holds the model.

    Nodes must share no machine, lend one device each and know their speeds: then a stage's time
    depends on no other stage, and for each order of nodes the best cuts are found exactly.
    """
    stages = _Stages(inputs)
    best: dict[NodeId, Best] = {}
    for layout in _layouts(stages, sorted(inputs.rooms)):
        seconds, host = seconds_of(inputs, layout), layout.host
        if seconds is not None and (host not in best or seconds < best[host].seconds):
            best[host] = Best(seconds=seconds, layout=layout)
    return dict(sorted(best.items(), key=lambda each: (each[1].seconds, each[0])))


def _layouts(stages: _Stages, nodes: Sequence[NodeId]) -> Iterator[Layout]:
    """For each host, order of workers and place of the head, the one with the best cuts."""
    for host in nodes:
        for head_on_worker in (False, True):
            ends = stages.of_host(host, head=not head_on_worker)
            for spans in stages.continued(ends, [node for node in nodes if node != host], head_on_worker):
                yield Layout(host=host, spans=spans, head_on_worker=head_on_worker)


_Ends = dict[int, tuple[float, tuple[Span, ...]]]
"""By the layers that are placed, the least seconds, and where they are then."""


class _Stages:
    def __init__(self, inputs: PlanInputs) -> None:
        self._inputs = inputs
        self._known: dict[tuple[NodeId, int, int, bool, bool], float] = {}

    def of_host(self, host: NodeId, *, head: bool) -> _Ends:
        """The host may have no layer."""
        ends: _Ends = {}
        for last in range(self._inputs.load.count + 1):
            seconds = self._seconds(host, 0, last, host=True, head=head)
            if seconds < inf:
                ends[last] = (seconds, (Span(host, 0, last),) if last else ())
        return ends

    def continued(
        self, ends: _Ends, left: Sequence[NodeId], head_on_worker: bool
    ) -> Iterator[tuple[Span, ...]]:
        """The best cuts of every order of some of those who are left; a worker has at least one layer."""
        count = self._inputs.load.count
        if count in ends and not head_on_worker:
            yield ends[count][1]
        for worker in left:
            if head_on_worker and (last := self._extended(ends, worker, head=True).get(count)):
                yield last[1]
            further = self._extended(ends, worker, head=False)
            if further:
                yield from self.continued(further, [node for node in left if node != worker], head_on_worker)

    def _extended(self, ends: _Ends, worker: NodeId, *, head: bool) -> _Ends:
        count, found = self._inputs.load.count, dict[int, tuple[float, tuple[Span, ...]]]()
        for first, (before_s, spans) in ends.items():
            for last in (count,) if head else range(first + 1, count + 1):
                seconds = before_s + self._seconds(worker, first, last, host=False, head=head)
                if first < last and seconds < found.get(last, (inf, ()))[0]:
                    found[last] = (seconds, (*spans, Span(worker, first, last)))
        return found

    def _seconds(self, node: NodeId, first: int, last: int, *, host: bool, head: bool) -> float:
        """That a stage reads weights for; infinite where it does not fit."""
        key = (node, first, last, host, head)
        if key not in self._known:
            self._known[key] = self._read_s(*key)
        return self._known[key]

    def _read_s(self, node: NodeId, first: int, last: int, host: bool, head: bool) -> float:
        inputs, place = self._inputs, Place(node)
        room, speed = inputs.room(place, host=node if host else None), inputs.speeds[place]
        allocation = lodge(Ledger().free(room), inputs.load, first, last, host=host, head=head)
        if allocation is None or speed is None:
            return inf
        head_s = inputs.load.head_bytes / speed.head_bytes_per_s if head else 0.0
        span = Span(node, first, last)
        return head_s + stage_seconds(inputs, span, allocation, speed, node if host else None)
