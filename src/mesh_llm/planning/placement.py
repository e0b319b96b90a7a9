"""Which of the chosen nodes compute which layers, and on which of their devices. Pure.

For one request at a time the time per token is a sum over stages and hops, so
the fastest nodes are filled first. Of their devices those take part that are
needed: those of one node follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh_llm.defaults import SPILL_BYTES_PER_S
from mesh_llm.frozen import frozen
from mesh_llm.planning.cuts import MAX_DEVICES, may_split, too_many
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.layer_shares import Capacity, capacity, fastest_first, lay_out, spread
from mesh_llm.planning.memory_layout import divided
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.predict import token_seconds
from mesh_llm.planning.worker_order import arrange
from mesh_llm.types import NodeId, Place


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

    @property
    def workers(self) -> tuple[NodeId, ...]:
        """In the order of their layers."""
        return tuple(dict.fromkeys(span.node for span in self.spans if span.node != self.host))

    @property
    def ranges(self) -> tuple[Span, ...]:
        """The layers of each node, whatever devices they lie on."""
        found: dict[NodeId, Span] = {}
        for span in self.spans:
            first = found[span.node].first if span.node in found else span.first
            found[span.node] = Span(span.node, first, span.last)
        return tuple(found.values())


def alone(inputs: PlanInputs, host: NodeId) -> Layout | None:
    """The whole model on one node, if it fits."""
    if inputs.whole_model(host) is None:
        return None
    return Layout(host=host, spans=(Span(host, 0, inputs.load.count),))


def layers_lent(inputs: PlanInputs, node: NodeId) -> int:
    """How many layers all of its devices hold."""
    return sum(size for size, _ in _able(inputs, node))


def filled(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> Layout | None:
    """The host and exactly these workers, the fastest filled first. The host may end up without a layer.

    Where they hold the model only with its head on a worker, it lies there.
    """
    if not _may_take_part(inputs, host, workers) or len(workers) > inputs.load.count:
        return None
    order = _offered(inputs, host, arrange(inputs, host, workers, quick=quick))
    layout = _filled_over(inputs, host, order)
    if layout is None and workers:
        layout = _filled_over(inputs, host, order, head_on_worker=True)
    return layout


def _filled_over(
    inputs: PlanInputs, host: NodeId, order: Sequence[Place], *, head_on_worker: bool = False
) -> Layout | None:
    sizes = _capacities(inputs, host, order, head_on_worker=head_on_worker)
    if sizes is None:
        return None
    firsts = {place.node: place for place in reversed(order)}
    least = [int(place.node != host and firsts[place.node] == place) for place in order]
    # Where speeds are unknown how much they hold decides, all GPUs before all main memory.
    rates = _rates(inputs, host, order) or [(1e6 + size.gpu, float(size.total)) for size in sizes]
    wanted = fastest_first(inputs.load.count, sizes, rates, least)
    needed = [
        (place, count) for place, count in zip(order, wanted, strict=True) if count or place.node == host
    ]
    layout = _laid(
        inputs,
        host,
        [place for place, _ in needed],
        [count for _, count in needed],
        head_on_worker=head_on_worker,
    )
    if layout is None and len(needed) < len(order):
        layout = _laid(inputs, host, order, wanted, head_on_worker=head_on_worker)
    return layout


def spread_out(
    inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId], *, quick: bool = False
) -> Layout | None:
    """At least a layer on the host and on each of these workers, the more the faster they are.

    All their GPUs take part; main memory beside a GPU only where it has to.
    """
    if not _may_take_part(inputs, host, workers) or len(workers) >= inputs.load.count:
        return None
    nodes = arrange(inputs, host, workers, quick=quick)
    fewer, more = (_offered(each, host, nodes) for each in (on_gpus(inputs, workers), inputs))
    layout = _spread_over(inputs, host, fewer)
    return layout if layout or more == fewer else _spread_over(inputs, host, more)


def _spread_over(inputs: PlanInputs, host: NodeId, order: Sequence[Place]) -> Layout | None:
    sizes = _capacities(inputs, host, order)
    if sizes is None or not all(size.total for size in sizes):
        return None
    rates = _rates(inputs, host, order)
    if rates is None:
        rates = [(float(inputs.room(place, host=host).total_bytes),) * 2 for place in order]
    layout = _laid(inputs, host, order, spread(inputs.load.count, sizes, rates))
    return layout if layout and len(layout.spans) == len(order) else None


def _may_take_part(inputs: PlanInputs, host: NodeId, workers: Sequence[NodeId]) -> bool:
    return may_split(inputs.load.facts) and not too_many(len(workers), len(inputs.rooms[host].gpus))


def on_gpus(inputs: PlanInputs, workers: Sequence[NodeId]) -> PlanInputs:
    """The same without main memory beside a GPU that holds a layer."""
    several = [node for node in workers if len(inputs.devices[node]) > 1]
    gpus = {
        node: tuple(place for _, place in _able(inputs, node) if inputs.lent[place].gpus) for node in several
    }
    return replace(inputs, devices={**inputs.devices, **{node: own for node, own in gpus.items() if own}})


def _offered(inputs: PlanInputs, host: NodeId, nodes: Sequence[NodeId]) -> list[Place]:
    """The host, and devices of these nodes: of each the first that holds a layer, and of all the others as
    many as may take part, the largest first."""
    chosen: list[Place] = []
    more: list[tuple[int, Place]] = []
    for node in nodes:
        first, *others = inputs.devices[node]
        if others:
            (_, first), *able = _able(inputs, node) or [(0, first)]
            more += able
        chosen.append(first)
    most = min(MAX_DEVICES - len(inputs.rooms[host].gpus), inputs.load.count - 1)
    more.sort(key=lambda pair: (-pair[0], pair[1]))
    chosen += [place for _, place in more[: max(0, most - len(chosen))]]
    return [Place(host), *(place for node in nodes for place in inputs.devices[node] if place in chosen)]


def _able(inputs: PlanInputs, node: NodeId) -> list[tuple[int, Place]]:
    """The devices of a node that hold a layer, and how many each does."""
    sizes = [(_holds(inputs, place), place) for place in inputs.devices[node]]
    return [(size, place) for size, place in sizes if size]


def _holds(inputs: PlanInputs, place: Place) -> int:
    if place not in inputs.sizes:
        size = capacity(inputs.lent[place], inputs.load, host=False)
        inputs.sizes[place] = size.total if size else 0
    return inputs.sizes[place]


def _laid(
    inputs: PlanInputs,
    host: NodeId,
    order: Sequence[Place],
    wanted: Sequence[int],
    *,
    head_on_worker: bool = False,
) -> Layout | None:
    spans = lay_out(inputs, host, order, wanted, head_on_worker=head_on_worker)
    if spans is None or inputs.allocations(host, spans, head_on_worker=head_on_worker) is None:
        return None
    if {span.node for span in spans} | {host} != {place.node for place in order}:
        return None  # a worker without a layer
    return Layout(host=host, spans=spans, head_on_worker=head_on_worker)


def _capacities(
    inputs: PlanInputs, host: NodeId, order: Sequence[Place], *, head_on_worker: bool = False
) -> list[Capacity] | None:
    rooms = divided({place: inputs.room(place, host=host) for place in order})
    sizes = [
        capacity(
            rooms[place],
            inputs.load,
            host=place.node == host,
            head=place == order[-1] if head_on_worker else place.node == host,
        )
        for place in order
    ]
    known = [size for size in sizes if size]
    return known if len(known) == len(sizes) else None


def _rates(inputs: PlanInputs, host: NodeId, order: Sequence[Place]) -> list[tuple[float, float]] | None:
    """Of GPUs and of main memory; None where one is unknown."""
    speeds = [inputs.speeds[place] for place in order]
    known = [speed.read_bytes_per_s for speed in speeds if speed]
    if len(known) < len(order):
        return None
    return [
        (rate, min(rate, SPILL_BYTES_PER_S) if inputs.room(place, host=host).gpus else rate)
        for place, rate in zip(order, known, strict=True)
    ]


def with_head(inputs: PlanInputs, layout: Layout) -> Layout:
    """The same with the output head where it belongs."""
    last = layout.spans[-1].node
    here, there = inputs.speeds[Place(layout.host)], inputs.speeds[layout.spans[-1].place]
    if last == layout.host or here is None or there is None:
        return layout
    places = HeadPlaces(
        head_bytes=inputs.load.head_bytes,
        vocabulary=inputs.load.facts.vocabulary,
        hidden=inputs.load.facts.hidden,
        host_bytes_per_s=here.head_bytes_per_s,
        worker_bytes_per_s=there.head_bytes_per_s,
        link_bytes_per_s=inputs.way(last, layout.host, layout.host).bytes_per_s,
    )
    moved = (
        head_belongs_on_worker(places)
        and inputs.allocations(layout.host, layout.spans, head_on_worker=True) is not None
    )
    return Layout(host=layout.host, spans=layout.spans, head_on_worker=True) if moved else layout


_LAST_TRIED = 12
"""Workers up to which each is tried as the last one: with more of them hops outweigh a head."""


def with_head_at_best(inputs: PlanInputs, layout: Layout) -> Layout:
    """The same with the head where it belongs, and whoever is best at it as the last worker."""
    first = with_head(inputs, layout)
    here = inputs.speeds[Place(layout.host)]
    own = [span for span in layout.spans if span.node == layout.host]
    workers = [span for span in layout.spans if span.node != layout.host]
    if here is None or not 2 <= len(workers) <= _LAST_TRIED:
        return first
    best, best_s = first, seconds_of(inputs, first)
    for last in workers:
        speed = inputs.speeds[last.place]
        if best_s is None or speed is None or speed.read_bytes_per_s <= here.read_bytes_per_s:
            continue
        # Those of its node stay beside it.
        others = sorted((span for span in workers if span is not last), key=lambda s: s.node == last.node)
        order = [*own, *others, last]
        wanted = [span.last - span.first for span in order]
        places = [span.place for span in order]
        moved = _laid(inputs, layout.host, places, wanted, head_on_worker=layout.head_on_worker)
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
