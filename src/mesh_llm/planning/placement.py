"""Which nodes compute which layers. Pure.

For one request at a time the time per token is a sum over stages and hops, so
the best plan has the fewest, closest, fastest nodes that hold the model, and
the fastest of them are filled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_llm.defaults import PLAN_SEARCH_STEPS, SPILL_BYTES_PER_S
from mesh_llm.frozen import frozen
from mesh_llm.planning.cuts import may_split, too_many
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.layer_shares import Capacity, capacity, fastest_first, lay_out, spread
from mesh_llm.planning.memory_layout import divided
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.predict import token_seconds
from mesh_llm.planning.worker_order import arrange
from mesh_llm.types import NodeId


@frozen
class Layout:
    """Who hosts, and who has which layers: a plan without its numbers."""

    host: NodeId
    spans: tuple[Span, ...]
    head_on_worker: bool = False

    @property
    def nodes(self) -> frozenset[NodeId]:
        return frozenset((self.host, *(span.node for span in self.spans)))

    @property
    def solo(self) -> bool:
        return all(span.node == self.host for span in self.spans)


def alone(inputs: PlanInputs, host: NodeId) -> Layout | None:
    """The whole model on one node, if it fits."""
    spans = (Span(host, 0, inputs.load.count),)
    if inputs.allocations(host, spans, head_on_worker=False) is None:
        return None
    return Layout(host=host, spans=spans)


def fewest(inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId]) -> Layout | None:
    """The model over the host and as few of the workers as hold it; of those sets, a fastest."""
    own = capacity(inputs.rooms[host], inputs.load, host=True)
    if own is None:
        return None
    sizes = {node: capacity(inputs.lent[node], inputs.load, host=False) for node in workers}
    largest = [(size.total, node) for node, size in sizes.items() if size and size.total]
    largest.sort(key=lambda pair: (-pair[0], pair[1]))
    held = own.total
    chosen: list[NodeId] = []
    layout = None
    for size, node in largest:
        if held >= inputs.load.count and chosen:
            layout = filled(inputs, host, chosen, quick=True)
            if layout:
                break
        chosen.append(node)
        held += size
    layout = layout or (filled(inputs, host, chosen, quick=True) if held >= inputs.load.count else None)
    if layout is None:
        return None
    search = _Search(inputs=inputs, host=host, layout=layout)
    search.drop()
    search.swap([node for _, node in largest])
    return filled(inputs, host, search.workers()) or search.layout


@dataclass(slots=True, kw_only=True)
class _Search:
    """Improves a layout by small steps, a bounded number of them."""

    inputs: PlanInputs
    host: NodeId
    layout: Layout
    steps: int = PLAN_SEARCH_STEPS

    def drop(self) -> None:
        """Nodes that turn out not to be needed: who shares a machine may add nothing."""
        for node in sorted(self.workers(), key=lambda node: (self.inputs.lent[node].total_bytes, node)):
            rest = [other for other in self.workers() if other != node]
            if rest and (smaller := self._filled(rest)):
                self.layout = smaller

    def swap(self, others: Sequence[NodeId]) -> None:
        """One of the chosen for one of the others, as long as that makes it faster."""
        seconds = self._seconds(self.layout)
        if seconds is None:
            return
        promising = sorted(others, key=self._promise)
        better = True
        while better and self.steps > 0:
            better = False
            for old in sorted(self.workers(), key=self._promise, reverse=True):
                for new in promising:
                    found = self._exchange(old, new)
                    time = self._seconds(found) if found else None
                    if found and time is not None and time < seconds * (1 - 1e-9):
                        self.layout, seconds, better = found, time, True
                        break
                    if self.steps <= 0:
                        return
                if better:
                    break

    def _exchange(self, old: NodeId, new: NodeId) -> Layout | None:
        workers = self.workers()
        if new in workers:
            return None
        return self._filled([new if node == old else node for node in workers])

    def _filled(self, workers: Sequence[NodeId]) -> Layout | None:
        if self.steps <= 0:
            return None
        self.steps -= len(workers) + 1
        return filled(self.inputs, self.host, workers, quick=True)

    def workers(self) -> list[NodeId]:
        return [span.node for span in self.layout.spans if span.node != self.host]

    def _seconds(self, layout: Layout) -> float | None:
        return token_seconds(self.inputs, self.host, layout.spans, head_on_worker=False)

    def _promise(self, node: NodeId) -> tuple[float, NodeId]:
        """Roughly what it would add: a layer, and the way there and back."""
        load, speed = self.inputs.load, self.inputs.speeds[node]
        if speed is None:
            return float("inf"), node
        way = self.inputs.way(self.host, node, self.host)
        read = load.active[-1] / load.count / speed.read_bytes_per_s
        return read + 2 * (way.delay_s + way.overhead_s), node


def filled(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> Layout | None:
    """The host and exactly these workers, the fastest filled first. The host may end up without a layer."""
    if not _may_take_part(inputs, host, workers):
        return None
    order = (host, *arrange(inputs, host, workers, quick=quick))
    sizes = _capacities(inputs, host, order)
    if sizes is None:
        return None
    least = [0] + [1] * len(workers)
    # Where speeds are unknown how much they hold decides, all GPUs before all main memory.
    rates = _rates(inputs, order) or [(1e6 + size.gpu, float(size.total)) for size in sizes]
    wanted = fastest_first(inputs.load.count, sizes, rates, least)
    return _laid(inputs, host, order, wanted)


def spread_out(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> Layout | None:
    """At least a layer on the host and on each of these workers, the more the faster they are."""
    if not _may_take_part(inputs, host, workers):
        return None
    order = (host, *arrange(inputs, host, workers, quick=quick))
    sizes = _capacities(inputs, host, order)
    if sizes is None or len(order) > inputs.load.count or not all(size.total for size in sizes):
        return None
    rates = _rates(inputs, order)
    if rates is None:
        rates = [(float(inputs.room(node, host=host).total_bytes),) * 2 for node in order]
    layout = _laid(inputs, host, order, spread(inputs.load.count, sizes, rates))
    return layout if layout and len(layout.spans) == len(order) else None


def _may_take_part(inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId]) -> bool:
    return may_split(inputs.load.facts) and not too_many(len(workers), len(inputs.rooms[host].gpus))


def _laid(inputs: PlanInputs, host: NodeId, order: Sequence[NodeId], wanted: Sequence[int]) -> Layout | None:
    spans = lay_out(inputs, host, order, wanted)
    if spans is None or inputs.allocations(host, spans, head_on_worker=False) is None:
        return None
    if {span.node for span in spans} | {host} != set(order):
        return None  # a worker without a layer
    return Layout(host=host, spans=spans)


def _capacities(inputs: PlanInputs, host: NodeId, order: Sequence[NodeId]) -> list[Capacity] | None:
    rooms = divided({node: inputs.room(node, host=host) for node in order})
    sizes = [capacity(rooms[node], inputs.load, host=node == host) for node in order]
    known = [size for size in sizes if size]
    return known if len(known) == len(sizes) else None


def _rates(inputs: PlanInputs, order: Sequence[NodeId]) -> list[tuple[float, float]] | None:
    """Of each node's GPUs and of its main memory; None where one is unknown."""
    speeds = [inputs.speeds[node] for node in order]
    known = [speed.read_bytes_per_s for speed in speeds if speed]
    if len(known) < len(order):
        return None
    return [
        (rate, min(rate, SPILL_BYTES_PER_S) if inputs.rooms[node].gpus else rate)
        for node, rate in zip(order, known, strict=True)
    ]


def with_head(inputs: PlanInputs, layout: Layout) -> Layout:
    """The same with the output head where it belongs."""
    last = layout.spans[-1].node
    here, there = inputs.speeds[layout.host], inputs.speeds[last]
    if last == layout.host or here is None or there is None:
        return layout
    places = HeadPlaces(
        head_bytes=inputs.load.head_bytes,
        vocabulary=inputs.load.facts.vocabulary,
        hidden=inputs.load.facts.hidden,
        host_bytes_per_s=here.read_bytes_per_s,
        worker_bytes_per_s=there.read_bytes_per_s,
        link_bytes_per_s=inputs.way(last, layout.host, layout.host).bytes_per_s,
    )
    fits = inputs.allocations(layout.host, layout.spans, head_on_worker=True) is not None
    moved = fits and head_belongs_on_worker(places)
    return Layout(host=layout.host, spans=layout.spans, head_on_worker=True) if moved else layout


_LAST_TRIED = 12
"""Workers up to which each is tried as the last one: with more of them hops outweigh a head."""


def with_head_at_best(inputs: PlanInputs, layout: Layout) -> Layout:
    """The same with the head where it belongs, and whoever is best at it as the last worker."""
    first = with_head(inputs, layout)
    here = inputs.speeds[layout.host]
    own = [span for span in layout.spans if span.node == layout.host]
    workers = [span for span in layout.spans if span.node != layout.host]
    if here is None or not 2 <= len(workers) <= _LAST_TRIED:
        return first
    best, best_s = first, seconds_of(inputs, first)
    for last in workers:
        speed = inputs.speeds[last.node]
        if best_s is None or speed is None or speed.read_bytes_per_s <= here.read_bytes_per_s:
            continue
        order = [*own, *(span for span in workers if span is not last), last]
        wanted = [span.last - span.first for span in order]
        moved = _laid(inputs, layout.host, [span.node for span in order], wanted)
        found = with_head(inputs, moved) if moved else first
        time = seconds_of(inputs, found)
        if time is not None and time < best_s * (1 - 1e-9):
            best, best_s = found, time
    return best


def seconds_of(inputs: PlanInputs, layout: Layout, *, delay_factor: float = 1.0) -> float | None:
    """Between two tokens; see `token_seconds`."""
    return token_seconds(
        inputs,
        layout.host,
        layout.spans,
        head_on_worker=layout.head_on_worker,
        delay_factor=delay_factor,
    )


LOGIT_BYTES = 4


@frozen
class HeadPlaces:
    """What decides: the head's size, and how fast each side would be with it."""

    head_bytes: int
    """Also where it is tied to the embedding: the bytes that a token's logits read."""
    vocabulary: int
    hidden: int
    host_bytes_per_s: float
    """At which the host's own device reads weights."""
    worker_bytes_per_s: float
    link_bytes_per_s: float
    """From the last worker to the host."""


def head_belongs_on_worker(places: HeadPlaces) -> bool:
    """True where the host would take longer for the head than the logits take to come back.

    The delay of the link does not count: the last worker's result crosses it
    either way, as an activation or as logits.
    """
    on_host = places.head_bytes / places.host_bytes_per_s
    more_to_send = LOGIT_BYTES * max(0, places.vocabulary - places.hidden)
    on_worker = places.head_bytes / places.worker_bytes_per_s + more_to_send / places.link_bytes_per_s
    return on_worker < on_host
