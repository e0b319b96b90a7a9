"""The ways to other members: their kind, their delay, and what crosses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mesh_llm.defaults import HOP_LOCAL_S
from mesh_llm.errors import LinkFailed, PeerLost
from mesh_llm.peers.members import Members
from mesh_llm.peers.own_machine import OwnMachine
from mesh_llm.status_schema import Traffic
from mesh_llm.types import LinkFacts, LinkKind, NodeId

MESH_METER_S = 1.0
"""Between two looks at the bytes that crossed each connection."""
MESH_RTT_CHANGE = 0.25
MESH_RTT_LEAST_S = 0.0005
"""Less of a change, by share or by time, is noise to a planner."""


@dataclass(slots=True, kw_only=True)
class Meter:
    """Bytes both ways; a connection that was made anew counts from nothing."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bytes_per_s: float = 0.0
    """Since the last reading but one."""
    peak_bytes_per_s: float = 0.0
    _read_at: float | None = None

    def read(self, sent_bytes: int, received_bytes: int, now: float) -> None:
        before = self.sent_bytes + self.received_bytes
        grown = sent_bytes + received_bytes - before
        if self._read_at is not None and now > self._read_at and grown >= 0:
            self.bytes_per_s = grown / (now - self._read_at)
            self.peak_bytes_per_s = max(self.peak_bytes_per_s, self.bytes_per_s)
        self.sent_bytes, self.received_bytes, self._read_at = sent_bytes, received_bytes, now


class Paths:
    def __init__(self, members: Members, own_machine: OwnMachine) -> None:
        self._members = members
        self._own_machine = own_machine
        self.farther_s: Callable[[NodeId], float] = lambda _: 0.0
        """Added to the round trip to a node: a laboratory's longer links are not where pings go."""
        self._meters: dict[NodeId, Meter] = {}
        self._metered = 0.0

    def link_to(self, node: NodeId) -> LinkFacts | None:
        """What is known of the way that data takes to `node`: shown and planned with alike."""
        if node == self._members.me:
            return LinkFacts(kind=LinkKind.SELF, rtt_s=0.0)
        kind = self.of_links(node)
        if kind is LinkKind.LOCAL:
            # A socket, from child to child. Pings go through QUIC and two loops, and tell how busy those are.
            return LinkFacts(kind=kind, rtt_s=HOP_LOCAL_S + self.farther_s(node))
        member = self._members.member(node)
        rtt_s = member.rtt_s if member is not None else None
        if rtt_s is None:
            rtt_s = self._forwarded_rtt_s(node)
        if rtt_s is None:
            return None
        return LinkFacts(kind=kind, rtt_s=rtt_s + self.farther_s(node))

    def _forwarded_rtt_s(self, node: NodeId) -> float | None:
        """Of the way through another member: our part of it, and what that member has told of the rest."""
        for between in self.between(node)[:1]:
            helper = self._members.member(between)
            if helper is not None and helper.rtt_s is not None:
                rest = dict(helper.facts.links).get(node)
                return helper.rtt_s + rest.rtt_s if rest is not None else None
        return None

    def between(self, node: NodeId) -> tuple[NodeId, ...]:
        """Members that pass on what is meant for `node`; nobody has to where it is connected."""
        member = self._members.member(node)
        if member is None or member.connected or node == self._members.me:
            return ()
        return tuple(other for other in member.via if self._members.peer(other) is not None)

    def of_links(self, node: NodeId) -> LinkKind:
        """The way that data links take."""
        if self._own_machine.has_door(node):
            return LinkKind.LOCAL
        way = self.of_streams(node)
        return LinkKind.TCP if way is LinkKind.QUIC and self._is_plain(node) else way

    def _is_plain(self, node: NodeId) -> bool:
        """Both have said that the network between them is private."""
        member = self._members.member(node)
        return self._members.facts.plain_lan and member is not None and member.facts.plain_lan

    def of_streams(self, node: NodeId) -> LinkKind:
        """The way that streams take."""
        peer = self._members.peer(node)
        if peer is None:
            return LinkKind.RELAY
        try:
            return peer.path().kind
        except PeerLost:
            return LinkKind.QUIC

    def host_of(self, node: NodeId) -> str:
        """The IP address from which `node` is heard."""
        peer = self._members.peer(node)
        if peer is None or peer.path().kind is not LinkKind.QUIC:
            raise LinkFailed(f"there is no direct path to {self._members.name_of(node)}")
        return peer.path().remote.rpartition(":")[0].strip("[]")

    # -- what crosses them ---------------------------------------------------------------------

    def traffic(self, node: NodeId) -> Traffic:
        """Bytes since `node` was connected, and per second, now and at best."""
        meter = self.meter(node)
        return Traffic(
            sent_bytes=meter.sent_bytes,
            received_bytes=meter.received_bytes,
            bytes_per_s=round(meter.bytes_per_s),
            peak_bytes_per_s=round(meter.peak_bytes_per_s),
        )

    def meter(self, node: NodeId) -> Meter:
        """As it was read last."""
        return self._meters.get(node, Meter())

    def remote(self, node: NodeId) -> str | None:
        """Where `node` is heard from."""
        peer = self._members.peer(node)
        try:
            return peer.path().remote if peer is not None else None
        except PeerLost:
            return None

    def read_meters(self, now: float) -> None:
        if now - self._metered < MESH_METER_S:
            return
        self._metered = now
        for node in [member.id for member in self._members.members if member.connected]:
            if (peer := self._members.peer(node)) is not None:
                crossed = peer.crossed()
                meter = self._meters.setdefault(node, Meter())
                meter.read(crossed.sent_bytes, crossed.received_bytes, now)

    def news(self) -> tuple[tuple[NodeId, LinkFacts], ...] | None:
        """All links, if what was measured of one is another than was told, by more than noise."""
        told = dict(self._members.facts.links)
        others = (member.id for member in self._members.alive() if member.id != self._members.me)
        links = {node: link for node in others if (link := self.link_to(node)) is not None}
        same = links.keys() == told.keys() and all(_is_about(links[node], told[node]) for node in links)
        return None if same else tuple(sorted(links.items()))


def _is_about(new: LinkFacts, old: LinkFacts) -> bool:
    difference = abs(new.rtt_s - old.rtt_s)
    return new.kind is old.kind and (
        difference < MESH_RTT_LEAST_S or difference < MESH_RTT_CHANGE * max(new.rtt_s, old.rtt_s)
    )
