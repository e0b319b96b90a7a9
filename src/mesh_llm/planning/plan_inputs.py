"""What all plans for one model over one snapshot stand on: memory, speeds, and what hops cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from mesh_llm.defaults import HOP_LOCAL_S
from mesh_llm.frozen import frozen
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.layer_costs import LayerCosts, Span, load_of
from mesh_llm.planning.memory_layout import Allocation, Ledger, NodeMemory, dealt, lodge, places_of, rooms
from mesh_llm.planning.model_speed import LEAST_RATE, ModelSpeed, model_speed, work_of
from mesh_llm.planning.shared_machines import at_once, nodes_beside, shared
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import LinkFacts, LinkKind, ModelFacts, NodeId, Place, Speed

HOP_TCP_S = 0.0002
"""The same, and the network's interrupts."""
HOP_QUIC_S = 0.0008
"""What the splice between a QUIC stream and a worker may add."""
HOP_RELAY_S = 0.0015
"""One more process on the way, that waits for its turn."""
LOCAL_BYTES_PER_S = 2e9
QUIC_BYTES_PER_S = 1e8
TCP_BYTES_PER_S = 1.1e8
RELAY_BYTES_PER_S = 5e6
"""That a link is taken to carry, by its kind: a unix socket, Gigabit Ethernet, a line at home."""
UNKNOWN_RTT_S = 0.03
"""Of links that nobody has measured: between a network at home and a far one, so that known near ones win."""


_OVERHEAD_S = {
    LinkKind.SELF: 0.0,
    LinkKind.LOCAL: HOP_LOCAL_S,
    LinkKind.TCP: HOP_TCP_S,
    LinkKind.QUIC: HOP_QUIC_S,
    LinkKind.RELAY: HOP_RELAY_S,
}
_BYTES_PER_S = {
    LinkKind.SELF: LOCAL_BYTES_PER_S,
    LinkKind.LOCAL: LOCAL_BYTES_PER_S,
    LinkKind.TCP: TCP_BYTES_PER_S,
    LinkKind.QUIC: QUIC_BYTES_PER_S,
    LinkKind.RELAY: RELAY_BYTES_PER_S,
}
_UNKNOWN = LinkFacts(kind=LinkKind.QUIC, rtt_s=UNKNOWN_RTT_S)
_WITHIN = LinkFacts(kind=LinkKind.LOCAL, rtt_s=HOP_LOCAL_S)
"""Between two devices of a node."""


@frozen
class PathCost:
    """From one stage to the next."""

    delay_s: float
    """One way, as measured."""
    overhead_s: float
    """What handling it adds."""
    bytes_per_s: float


@frozen
class PlanInputs:
    snapshot: Snapshot
    load: LayerCosts
    rooms: Mapping[NodeId, NodeMemory]
    """Of hosts."""
    lent: Mapping[Place, NodeMemory]
    """Of workers."""
    devices: Mapping[NodeId, tuple[Place, ...]]
    """That each lends, the best first."""
    speeds: Mapping[Place, ModelSpeed | None]
    """With the threads that each computes with."""
    whole: Mapping[Place, ModelSpeed | None]
    """Of the whole machine, where nodes share its threads."""
    at_once: Mapping[NodeId, float]
    """How many like it compute on its machine without slowing each other down."""
    routes: dict[tuple[NodeId, frozenset[NodeId], bool], tuple[NodeId, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Found already: they depend on no context."""
    sizes: dict[Place, int] = field(default_factory=dict, compare=False, repr=False)
    """Layers that a lent device holds, as far as they have been counted under this context."""
    _ways: dict[tuple[NodeId, NodeId], PathCost | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def at(self, context: int) -> PlanInputs:
        """The same with another context."""
        if context == self.load.settings.context:
            return self
        return self._with(replace(self.load.settings, context=context))

    def with_lanes(self, lanes: int) -> PlanInputs:
        """The same with so many engines."""
        return (
            self
            if lanes == self.load.settings.lanes
            else self._with(replace(self.load.settings, lanes=lanes))
        )

    def _with(self, settings: CacheSettings) -> PlanInputs:
        return replace(self, load=load_of(self.load.facts, settings), sizes={})

    def way(self, a: NodeId, b: NodeId, host: NodeId) -> PathCost:
        """Straight, or where two workers know no way to each other, over the host."""
        straight = self._way(a, b)
        if straight:
            return straight
        if host in (a, b):
            return way_of(None)
        there, on = self.way(a, host, host), self.way(host, b, host)
        return PathCost(
            delay_s=there.delay_s + on.delay_s,
            overhead_s=there.overhead_s + on.overhead_s,
            bytes_per_s=min(there.bytes_per_s, on.bytes_per_s),
        )

    def _way(self, a: NodeId, b: NodeId) -> PathCost | None:
        key = (a, b) if a < b else (b, a)
        if key not in self._ways:
            link = _WITHIN if a == b else self.snapshot.link(*key)
            self._ways[key] = way_of(link) if link else None
        return self._ways[key]

    def allocations(
        self, host: NodeId, spans: Sequence[Span], *, head_on_worker: bool
    ) -> tuple[Allocation, ...] | None:
        """Where the stages lie; None where one does not fit. A host without layers needs room, too."""
        ledger, found = Ledger(), []
        rooms = self.rooms_of(host, (span.place for span in spans))
        if all(span.node != host for span in spans):
            own = rooms[Place(host)]
            empty = lodge(ledger.free(own), self.load, 0, 0, host=True, head=not head_on_worker)
            if empty is None:
                return None
            ledger.take(own, empty.main_bytes, empty.gpu_bytes)
        for span in spans:
            here = span.node == host
            head = span is spans[-1] if head_on_worker else here
            room = rooms[span.place]
            allocation = lodge(ledger.free(room), self.load, span.first, span.last, host=here, head=head)
            if allocation is None:
                return None
            ledger.take(room, allocation.main_bytes, allocation.gpu_bytes)
            found.append(allocation)
        return tuple(found)

    def whole_model(self, host: NodeId) -> Allocation | None:
        """Where all layers lie on one node; None where they do not fit."""
        room, load = self.rooms[host], self.load
        if room.total_bytes < load.least_bytes:
            return None
        return lodge(Ledger().free(room), load, 0, load.count, host=True, head=True)

    def room(self, place: Place, *, host: NodeId | None) -> NodeMemory:
        """What there is at a place for a plan of this host."""
        return self.rooms[place.node] if place.node == host else self.lent[place]

    def rooms_of(self, host: NodeId, places: Iterable[Place]) -> Mapping[Place, NodeMemory]:
        """What these have when all of them take part."""
        return dealt({place: self.room(place, host=host) for place in (Place(host), *places)})


def ground_of(snapshot: Snapshot, facts: ModelFacts, settings: CacheSettings) -> PlanInputs:
    # Those who left no longer share anything, and those who lend nothing need no room.
    places = {node.id: places_of(node) for node in snapshot.nodes}
    here = rooms((node for node in snapshot.nodes if node.alive), places)
    whole = {
        place: _speed(device.speed if place.device else node.facts.speed)
        for node in snapshot.nodes
        for place, device in places[node.id].items()
    }
    cores = {node.id: node.facts.cores for node in snapshot.nodes}
    beside = nodes_beside(snapshot)
    work = work_of(facts)

    def own(place: Place, speed: Speed) -> Speed:
        return shared(speed, cores[place.node], beside[place.node])

    return PlanInputs(
        snapshot=snapshot,
        load=load_of(facts, settings),
        rooms=here.hosting,
        lent=here.lent,
        devices={id: tuple(lent)[1:] or tuple(lent) for id, lent in places.items()},
        speeds={
            place: model_speed(own(place, speed), work) if speed else None for place, speed in whole.items()
        },
        whole={place: model_speed(speed, work) if speed else None for place, speed in whole.items()},
        at_once={node.id: at_once(node.facts.threads, node.facts.machine_threads) for node in snapshot.nodes},
    )


def _speed(speed: Speed | None) -> Speed | None:
    """Anybody may claim anything: what is no speed is not taken for one."""
    figures = (speed.read_bytes_per_s, speed.flops_per_s, speed.attention_per_s) if speed else ()
    return speed if speed and all(LEAST_RATE <= each < math.inf for each in figures) else None


def way_of(link: LinkFacts | None) -> PathCost:
    """What is known of a link, as seconds; None: nobody has measured it.

    What it carries is taken from its kind. The most that was ever seen on it says little: activations
    are small, and a link that has carried 10 kB/s would be planned with as if it could do no more.
    """
    link = link or _UNKNOWN
    return PathCost(
        delay_s=link.rtt_s / 2, overhead_s=_OVERHEAD_S[link.kind], bytes_per_s=_BYTES_PER_S[link.kind]
    )
