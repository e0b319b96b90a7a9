"""What the parts of a view share: who is known, who is connected, who is doubted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mesh_llm.membership.dial_backoff import DialBackoff
from mesh_llm.membership.heartbeat import Heartbeat
from mesh_llm.membership.member import Member, Standing
from mesh_llm.membership.messages import Entry
from mesh_llm.membership.outbox import Outbox
from mesh_llm.membership.own_record import OwnRecord
from mesh_llm.membership.record import Record, Told, told
from mesh_llm.membership.record_table import RecordTable
from mesh_llm.membership.ring import MEMBER_SMALL, chosen
from mesh_llm.membership.seeded_random import SeededRandom
from mesh_llm.types import NodeFacts, NodeId

MEMBER_STALE_S = 1.5
"""Of silence: no longer told to others as heard, before we stop relying on it ourselves."""


Open = Callable[[Told], Record | None]
"""Verifies what was signed; None where its signer is no member, `Forged` where it is not the signer's."""


@dataclass(slots=True, kw_only=True)
class Doubt:
    """A suspicion of our own: unless it is taken back until `dead_at`, the node is dead."""

    incarnation: int
    dead_at: float
    vouch_at: float
    """From when on the word of a neighbour that hears the node ends it."""


@dataclass(slots=True, kw_only=True)
class Remembered:
    """Not a member, but perhaps there: an address to try."""

    record: Record
    since: float


@dataclass(slots=True, kw_only=True)
class Visitor:
    """A lite client that is connected here; nobody else hears of it."""

    link: Heartbeat
    facts: NodeFacts


class ViewState:
    def __init__(self, own: OwnRecord, open: Open, *, now: float, seed: int, observes: bool) -> None:
        self.me = own.record.node
        self.own = own
        self.open = open
        self.observes = observes
        """A lite client's: it learns of the members, and is none."""
        self.now = now
        self.records_table = RecordTable()
        if not observes:
            self.records_table.put(own.record)
        self.visitors: dict[NodeId, Visitor] = {}
        self.links: dict[NodeId, Heartbeat] = {}
        self.doubts: dict[NodeId, Doubt] = {}
        self.remembered: dict[NodeId, Remembered] = {}
        self.partners: frozenset[NodeId] = frozenset()
        self.wanted: frozenset[NodeId] = frozenset()
        """Those to be connected to."""
        self.outbox = Outbox()
        self.dialling = DialBackoff(self.me, SeededRandom(seed))
        self.restless = False
        """Whether somebody appeared or went: whom to be connected to has to be looked at again."""
        self.touched: set[NodeId] = {self.me}
        """Members that may look different after this step."""
        self.since: dict[NodeId, float] = {self.me: now}
        self._shown: dict[NodeId, tuple[object, ...]] = {}
        self.changed()

    # -- what is known --------------------------------------------------------------------------

    def record(self, node: NodeId) -> Record | None:
        return self.own.record if node == self.me else self.records_table.get(node)

    def renewed(self) -> None:
        """Our own record is another one: everybody is told."""
        self.touched.add(self.me)
        if not self.observes:
            self.records_table.put(self.own.record)
            self.outbox.tell(self.me, None)

    @property
    def listeners(self) -> list[NodeId]:
        """Whoever is connected, clients included."""
        return [*self.links, *self.visitors]

    def told(self, record: Record) -> Told:
        return told(self.own.sealed() if record.node == self.me else record)

    def news(self, node: NodeId) -> Told | Entry | None:
        """As neighbours are told. They most likely have what the node signed: of a doubt or its death they
        need no more than a hint. In a large mesh several of them have the same to tell: there others' news
        are announced, and whoever lacks them asks for them.
        """
        record = self.records_table.get(node)
        if record is None:
            return None
        told = self.told(record)
        if told.standing in (Standing.SUSPECT, Standing.DEAD):
            return told.hint()
        passed_on = node != self.me and len(self.records_table.ring) > MEMBER_SMALL
        return self.records_table.entry(node) if passed_on and not record.left else told

    def send(self, to: NodeId, *records: Record) -> None:
        self.outbox.send_records(to, [self.told(record) for record in records])

    def living(self, node: NodeId) -> Record | None:
        """Its record, unless it is gone or unknown."""
        record = self.records_table.get(node)
        return None if record is None or record.gone else record

    def heard(self, node: NodeId) -> bool:
        """On a connection of our own, just now."""
        link = self.links.get(node)
        return link is not None and link.silence(self.now) < MEMBER_STALE_S

    def vouchers(self, node: NodeId) -> list[NodeId]:
        """Neighbours that we hear and that say they hear `node`."""
        return [
            link.node
            for link in self.links.values()
            if node in link.hears and link.silence(self.now) < MEMBER_STALE_S
        ]

    def choose(self) -> frozenset[NodeId]:
        """Look again whom to be connected to; returns those who are new among them."""
        before = self.wanted
        partners = frozenset(node for node in self.partners if self.living(node) is not None)
        self.wanted = (chosen(self.me, self.records_table.ring) | partners) - {self.me}
        return self.wanted - before

    # -- what is shown --------------------------------------------------------------------------

    def member(self, node: NodeId) -> Member | None:
        if (visitor := self.visitors.get(node)) is not None:
            return self._visiting(node, visitor)
        record = self.record(node)
        if record is None:
            return None
        link = self.links.get(node)
        return Member(
            id=node,
            standing=self._standing(record),
            incarnation=record.incarnation,
            facts=record.facts,
            rtt_s=None if link is None else link.rtt_s,
            connected=link is not None,
            via=() if link is not None else self._via(node),
            since=self.since.get(node, self.now),
        )

    def _visiting(self, node: NodeId, visitor: Visitor) -> Member:
        return Member(
            id=node,
            standing=Standing.ALIVE,
            incarnation=0,
            facts=visitor.facts,
            rtt_s=visitor.link.rtt_s,
            connected=True,
            via=(),
            since=self.since.get(node, self.now),
        )

    def _standing(self, record: Record) -> Standing:
        if record.gone:
            return record.standing
        # What others suspect is theirs to find out; it shows once they are sure.
        return Standing.SUSPECT if record.node in self.doubts else Standing.ALIVE

    def _via(self, node: NodeId) -> tuple[NodeId, ...]:
        via = [link.node for link in self.links.values() if node in link.hears]
        return tuple(sorted(via)) if via else ()

    def changed(self) -> tuple[NodeId, ...]:
        """Of those touched, the ones that look different; and note since when."""
        found = []
        for node in self.touched:
            before = self._shown.get(node)
            looks = self._looks(node)
            if looks is None:
                self._shown.pop(node, None)
                self.since.pop(node, None)
            elif before is None or before[0] is not looks[0]:
                self.since[node] = self.now
            if looks is not None:
                self._shown[node] = looks
            if looks != before:
                found.append(node)
        self.touched.clear()
        return tuple(sorted(found))

    def _looks(self, node: NodeId) -> tuple[object, ...] | None:
        if (visitor := self.visitors.get(node)) is not None:
            return (Standing.ALIVE, 0, visitor.facts, True, ())
        record = self.record(node)
        if record is None:
            return None
        connected = node in self.links
        via = () if connected else self._via(node)
        return (self._standing(record), record.incarnation, record.facts, connected, via)
