"""Which nodes compute together with a host: few, close and fast ones that hold the model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from mesh_llm.defaults import PLAN_SEARCH_STEPS, SPILL_BYTES_PER_S
from mesh_llm.planning.layer_shares import capacity
from mesh_llm.planning.placement import Layout, filled, layers_lent, on_gpus, seconds_of, with_head
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.types import NodeId, Place

WORTH = 1.02
"""How much faster a further node, or another host, has to make a plan: nodes may leave, and delays stray."""
_CANDIDATES = 48
"""Of each kind, looked at in a large mesh: three times as many as may take part in a plan."""


def best_with(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, steps: int = PLAN_SEARCH_STEPS
) -> Layout | None:
    """The model over the host and as few of the workers as hold it, or more where that is faster.

    It may be faster yet if all of it lies on GPUs that would otherwise lie in main memory.
    """
    large = len(workers) > 2 * _CANDIDATES
    if large:
        workers = _candidates(inputs, host, workers)
    found = _best_with(inputs, host, workers, steps, large=large)
    gpus = on_gpus(inputs, workers)
    if found is None or gpus.devices == inputs.devices:
        return found
    other = _best_with(gpus, host, workers, steps, large=large)
    return other if other and faster(inputs, other, found) else found


def faster(inputs: PlanInputs, one: Layout, other: Layout, *, times: float = 1.0) -> bool:
    """Whether it is known to be that many times as fast, each with its head where it belongs."""
    then, now = (seconds_of(inputs, with_head(inputs, layout)) for layout in (one, other))
    return then is not None and now is not None and times * then < now * (1 - 1e-9)


def _candidates(inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId]) -> Sequence[NodeId]:
    """Those alone that a plan could need: the largest, and the fastest that are near."""
    largest = nsmallest(_CANDIDATES, workers, key=lambda node: (-_lent_bytes(inputs, node), node))
    nearest = nsmallest(_CANDIDATES, workers, key=lambda node: _promise(inputs, host, node))
    return sorted({*largest, *nearest})


def _lent_bytes(inputs: PlanInputs, node: NodeId) -> int:
    return sum(inputs.lent[place].total_bytes for place in inputs.devices[node])


def _promise(inputs: PlanInputs, host: NodeId, node: NodeId) -> tuple[float, NodeId]:
    """Roughly what a node would add: a layer, and the way there and back."""
    load, speed = inputs.load, inputs.speeds[Place(node)]
    if speed is None:
        return float("inf"), node
    way = inputs.way(host, node, host)
    read = load.active[-1] / load.count / speed.read_bytes_per_s
    return read + 2 * (way.delay_s + way.overhead_s), node


def _best_with(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], steps: int, *, large: bool
) -> Layout | None:
    own = capacity(inputs.rooms[host], inputs.load, host=True, head=False)
    if own is None:
        return None
    largest = largest_first(inputs, workers)
    layout = _first(inputs, host, own.total, largest)
    if layout is None:
        return None
    search = _Search(inputs=inputs, host=host, layout=layout, steps=steps)
    search.drop()
    if large:
        share = (inputs.load.count - own.total) / len(search.layout.workers)
        search.begin_with_nearest([node for size, node in largest if size >= share])
    search.improve([node for _, node in largest])
    return filled(inputs, host, search.layout.workers) or search.layout


def _first(
    inputs: PlanInputs, host: NodeId, held: int, largest: Sequence[tuple[int, NodeId]]
) -> Layout | None:
    """Over the largest, as many as hold it: one at least."""
    for nodes in (largest, apart(inputs, host, largest)):
        chosen: list[NodeId] = []
        together = held
        for size, node in nodes:
            chosen.append(node)
            together += size
            if together >= inputs.load.count and (layout := filled(inputs, host, chosen, quick=True)):
                return layout
    return None


def apart(
    inputs: PlanInputs, host: NodeId, largest: Sequence[tuple[int, NodeId]]
) -> list[tuple[int, NodeId]]:
    """One of each machine: those that share one may have no layer's room each, however much it has."""
    seen = {_machine(inputs, host)}
    found = []
    for size, node in largest:
        if (machine := _machine(inputs, node)) not in seen:
            seen.add(machine)
            found.append((size, node))
    return found


def _machine(inputs: PlanInputs, id: NodeId) -> str:
    node = inputs.snapshot.node(id)
    return (node.facts.machine if node is not None else "") or f"of {id}"


def largest_first(inputs: PlanInputs, workers: Sequence[NodeId]) -> list[tuple[int, NodeId]]:
    """Those with room for a layer, and for how many, the largest first."""
    sizes = {node: layers_lent(inputs, node) for node in workers}
    return sorted(
        ((size, node) for node, size in sizes.items() if size), key=lambda pair: (-pair[0], pair[1])
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """Improves a layout by small steps, a bounded number of them."""

    inputs: PlanInputs
    host: NodeId
    layout: Layout
    steps: int

    def drop(self) -> None:
        """Nodes that turn out not to be needed: who shares a machine may add nothing."""
        for node in sorted(self.layout.workers, key=lambda node: (_lent_bytes(self.inputs, node), node)):
            rest = [other for other in self.layout.workers if other != node]
            if rest and (smaller := self._filled(rest)):
                self.layout = smaller

    def begin_with_nearest(self, roomy: Sequence[NodeId]) -> None:
        """Of those with room for an equal share: one swap after the other would find them late."""
        self.steps //= 8
        nearest = self._filled(sorted(roomy, key=self._promise)[: len(self.layout.workers)])
        if nearest is None:
            return
        then, now = self._seconds(nearest), self._seconds(self.layout)
        if then is not None and (now is None or then < now):
            self.layout = nearest

    def improve(self, others: Sequence[NodeId]) -> None:
        """Exchange nodes, take one more or one fewer, as long as that makes it faster."""
        promising = sorted(others, key=self._promise)
        kinds: tuple[tuple[Callable[[Sequence[NodeId]], Iterator[list[NodeId]]], float], ...] = (
            (self._exchanges, 1.0),
            (self._additions, WORTH),
            (self._removals, 1.0),
        )
        while any(self._took(changes(promising), times) for changes, times in kinds):
            pass

    def _took(self, changes: Iterator[list[NodeId]], times: float) -> bool:
        """Take the first of these sets that is that many times as fast; whether there was one."""
        seconds = self._seconds(self.layout)
        if seconds is None:
            return False
        for workers in changes:
            if self.steps <= 0:
                return False
            found = self._filled(workers)
            time = self._seconds(found) if found else None
            if found and time is not None and times * time < seconds * (1 - 1e-9):
                self.layout = found
                return True
        return False

    def _exchanges(self, promising: Sequence[NodeId]) -> Iterator[list[NodeId]]:
        workers = self.layout.workers
        for old in sorted(workers, key=self._promise, reverse=True):
            for new in promising:
                if new not in workers:
                    yield [new if node == old else node for node in workers]

    def _additions(self, promising: Sequence[NodeId]) -> Iterator[list[NodeId]]:
        """Nobody adds anything who reads more slowly than all of those do that are there."""
        workers, slowest = self.layout.workers, self._slowest()
        for new in promising:
            speed = self.inputs.speeds[self.inputs.devices[new][0]]
            if new not in workers and speed and speed.read_bytes_per_s > slowest:
                yield [*workers, new]

    def _removals(self, promising: Sequence[NodeId]) -> Iterator[list[NodeId]]:
        workers = self.layout.workers
        for old in sorted(workers, key=self._promise, reverse=True) if len(workers) > 1 else ():
            yield [node for node in workers if node != old]

    def _slowest(self) -> float:
        """The rate at which some of the layers are read: infinite where it is unknown."""
        inputs, spans = self.inputs, self.layout.spans
        found = [float("inf")]
        on_worker = self.layout.head_on_worker
        for span, where in zip(
            spans, inputs.allocations(self.host, spans, head_on_worker=on_worker) or (), strict=False
        ):
            speed, spills = inputs.speeds[span.place], bool(inputs.room(span.place, host=self.host).gpus)
            if speed:
                found.append(speed.read_bytes_per_s)
            if spills and where.on_gpu < span.last - span.first:
                found.append(SPILL_BYTES_PER_S)
        return min(found)

    def _filled(self, workers: Sequence[NodeId]) -> Layout | None:
        if self.steps <= 0:
            return None
        self.steps -= len(workers) + 1
        return filled(self.inputs, self.host, workers, quick=True)

    def _seconds(self, layout: Layout) -> float | None:
        return seconds_of(self.inputs, with_head(self.inputs, layout))

    def _promise(self, node: NodeId) -> tuple[float, NodeId]:
        return _promise(self.inputs, self.host, node)
