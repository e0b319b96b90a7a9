"""A node's view of the mesh. Events and the time go in, effects come out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mesh_llm.membership.effects import Changed, Disconnect, Effect
from mesh_llm.membership.failure_detector import FailureDetector
from mesh_llm.membership.gossip import Gossip
from mesh_llm.membership.heartbeat import Heartbeat
from mesh_llm.membership.links import Links
from mesh_llm.membership.member import Member, Standing
from mesh_llm.membership.messages import (
    Ack,
    Compare,
    Hears,
    Leave,
    Message,
    Ping,
    Summary,
    Update,
    Want,
)
from mesh_llm.membership.own_record import OwnRecord, Seal
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view_state import Open, ViewState
from mesh_llm.membership.visitors import Visitors
from mesh_llm.types import NodeFacts, NodeId, Role

MEMBER_JUMP_S = 1.5
"""Between two looks at the clock: ticks come every 0.25 s, so we slept, not the others."""
MEMBER_LATE_S = 0.5
"""Between two looks: a tick was late, as others use this machine. What is beyond it is nobody's silence."""
MEMBER_CALM_S = 10.0
"""After a jump: connections may be gone on the other side; time to dial anew before judging anybody."""
MEMBER_TOMBSTONE_S = 3600.0
"""Old news about a dead member goes round for seconds; an hour also outlasts a nap."""
MEMBER_REMEMBER_S = 7 * 86400.0
"""Afterwards its address is still tried now and then: networks stay broken over a holiday."""


_SWEEP_S = 30.0


class View:
    """`now` may be any clock in seconds that all calls share; it may stand still and jump."""

    def __init__(
        self,
        me: NodeId,
        *,
        incarnation: int,
        facts: NodeFacts,
        now: float,
        seed: int,
        seal: Seal,
        open: Open,
    ) -> None:
        """`seal` signs what this node says, `open` verifies what others have signed."""
        record = Record(node=me, incarnation=incarnation, sequence=0, standing=Standing.ALIVE, facts=facts)
        observes = facts.role is Role.CLIENT
        self._state = ViewState(OwnRecord(record, seal), open, now=now, seed=seed, observes=observes)
        self._failure_detector = FailureDetector(self._state)
        self._gossip = Gossip(self._state, self._failure_detector)
        self._links = Links(self._state)
        self._visitors = Visitors(self._state, self._links, self._gossip)
        self._swept_at = now

    # -- what it shows --------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody, this node, the dead, those who left, and clients connected here included, by id."""
        state = self._state
        nodes = {state.me, *state.records_table.nodes(), *state.visitors}
        found = (state.member(node) for node in sorted(nodes))
        return tuple(member for member in found if member is not None)

    def member(self, node: NodeId) -> Member | None:
        return self._state.member(node)

    @property
    def records(self) -> tuple[Record, ...]:
        """Of nodes that are not gone, this one included: to be remembered over a restart (see `know`)."""
        ring = self._state.records_table.ring
        return tuple(record for node in ring if (record := self._state.records_table.get(node)) is not None)

    @property
    def all_records(self) -> tuple[Record, ...]:
        """Of everybody that was ever heard of, the dead and the remembered included."""
        state = self._state
        known = [
            record
            for node in state.records_table.nodes()
            if (record := state.records_table.get(node)) is not None
        ]
        return (*known, *(kept.record for kept in state.remembered.values()))

    def told(self, most: int, *, size_bytes: int) -> list[Told]:
        """The same as they travel, for one who is admitted: this node and those connected to it first."""
        state = self._state
        near = sorted(self.records, key=lambda r: (r.node != state.me, r.node not in state.links))
        found = [state.told(record) for record in near[:most]]
        while len(found) > 1 and sum(told.size_bytes for told in found) > size_bytes:
            found.pop()
        return found

    @property
    def digest(self) -> int:
        """Equal where two views agree on who lives, and on all facts."""
        return self._state.records_table.digest

    # -- what happens ---------------------------------------------------------------------------

    def on_connected(self, node: NodeId, now: float) -> list[Effect]:
        state = self._begin(now)
        if node == state.me:
            self._gossip.duplicate()
            state.outbox.add(Disconnect(node=node, reason="it has this node's own id"))
            return self._finish()
        if state.own.left:
            state.outbox.add(Disconnect(node=node, reason="this node is leaving"))
            return self._finish()
        known = state.records_table.get(node)
        if known is None or known.gone:
            # The network is back, or we are: others may be within reach again, too.
            state.dialling.hasten(now)
        state.dialling.end(node)
        state.links[node] = link = Heartbeat(node, now)
        state.touched.add(node)
        self._failure_detector.heard(node)
        if state.observes:
            self._visitors.introduce(node)
        else:
            doubted = known is not None and known.standing is not Standing.ALIVE
            state.send(node, state.own.record, *([known] if known and doubted else []))
        self._links.begin(link)
        if state.me < node or state.observes:
            self._gossip.sync(link)
        return self._finish()

    def on_visitor(self, node: NodeId, now: float) -> list[Effect]:
        """A lite client is connected: it is told what members know, and believed nothing about them."""
        self._begin(now)
        self._visitors.connected(node)
        return self._finish()

    def on_disconnected(self, node: NodeId, now: float) -> list[Effect]:
        state = self._begin(now)
        self._visitors.disconnected(node)
        link = state.links.pop(node, None)
        if link is not None and not state.own.left:
            self._failure_detector.closed(link)
            self._links.notice_hears()
        return self._finish()

    def on_message(self, sender: NodeId, message: Message, now: float) -> list[Effect]:
        state = self._begin(now)
        if (visitor := state.visitors.get(sender)) is not None:
            self._visitors.receive(visitor, message)
            return self._finish()
        link = state.links.get(sender)
        if link is None or state.own.left:
            return self._finish()
        link.heard_at = now
        self._failure_detector.heard(sender)
        if state.observes:
            self._gossip.revive(sender)
        self._receive(link, message)
        return self._finish()

    def _receive(self, link: Heartbeat, message: Message) -> None:
        match message:
            case Ping():
                self._links.on_ping(link, message)
                self._gossip.digest(link, message.incarnation, message.digest)
            case Ack():
                self._links.on_ack(link, message)
                self._gossip.digest(link, message.incarnation, message.digest)
            case Hears():
                self._state.touched |= link.told(message.nodes)
            case Update():
                self._gossip.update(link, message)
            case Compare():
                self._gossip.compare(link, message)
            case Summary():
                self._gossip.summary(link, message)
            case Want():
                self._gossip.want(link, message)
            case Leave() if message.record.node == link.node:
                self._gossip.update(link, Update(records=(message.record,)))

    def on_left(self, node: NodeId, now: float) -> list[Effect]:
        """It closed its connection saying that it stops; others hear that from itself, or not at all."""
        state = self._begin(now)
        known = state.living(node)
        if known is not None and not state.own.left:
            state.records_table.put(known.said(Standing.LEFT))
            state.touched.add(node)
            state.restless = True
            self._gossip.gone(state.records_table.get(node) or known)
        return self._finish()

    def on_tick(self, now: float) -> list[Effect]:
        state = self._begin(now)
        if state.own.left:
            return self._finish()
        self._links.choose()
        self._failure_detector.look()
        self._links.look()
        self._visitors.look()
        self._links.notice_hears()
        self._links.dial()
        if now - self._swept_at >= _SWEEP_S:
            self._sweep()
        return self._finish()

    # -- what its node wants --------------------------------------------------------------------

    def publish(self, facts: NodeFacts, now: float) -> list[Effect]:
        state = self._begin(now)
        before = state.own.record.facts
        if not state.own.left and state.own.publish(facts):
            if before.address != facts.address:
                # Another network, or the old one again: whoever was out of reach may not be any longer.
                state.dialling.hasten(now)
            state.renewed()
            if state.observes:
                for node in state.links:
                    self._visitors.introduce(node)
        return self._finish()

    def know(self, records: Iterable[Record], now: float) -> list[Effect]:
        state = self._begin(now)
        for record in records:
            if record.node != state.me and record.node not in state.records_table:
                self._gossip.remember(record)
        return self._finish()

    def forget(self, node: NodeId, now: float) -> list[Effect]:
        state = self._begin(now)
        if node == state.me:
            return self._finish()
        link = state.links.pop(node, None)
        if link is not None:
            state.touched |= link.hears
            state.outbox.add(Disconnect(node=node, reason="it has been expelled"))
        state.records_table.remove(node)
        state.remembered.pop(node, None)
        state.dialling.end(node)
        self._failure_detector.gone(node)
        state.touched.add(node)
        state.restless = True
        self._links.notice_hears()
        return self._finish()

    def set_partners(self, nodes: Collection[NodeId]) -> list[Effect]:
        self._state.partners = frozenset(nodes)
        self._state.restless = True
        self._links.choose()
        self._links.dial()
        return self._finish()

    def leave(self, now: float) -> list[Effect]:
        state = self._begin(now)
        if not state.own.left:
            state.own.leave()
            state.touched.add(state.me)
            if not state.observes:
                state.records_table.put(state.own.record)
                for node in state.listeners:
                    state.outbox.send(node, Leave(record=state.told(state.own.record)))
        return self._finish()

    # -- parts of a step ------------------------------------------------------------------------

    def _begin(self, now: float) -> ViewState:
        state = self._state
        gap_s = now - state.now
        state.now = now
        if not 0 <= gap_s <= MEMBER_JUMP_S:
            # It was us who slept: judge nobody by it, and look for everybody anew.
            self._failure_detector.calm(now + min(MEMBER_CALM_S, 2 * abs(gap_s)))
            state.dialling.hasten(now)
            self._swept_at = min(self._swept_at, now)
        elif gap_s > MEMBER_LATE_S:
            self._failure_detector.excuse(gap_s - MEMBER_LATE_S)
        return state

    def _finish(self) -> list[Effect]:
        state = self._state
        if state.restless and not state.own.left:
            self._links.choose()
        if not state.own.left:
            state.outbox.flush(state.news, state.listeners, state.now, len(state.records_table.ring))
        changed = state.changed() if state.touched else ()
        if changed:
            state.outbox.add(Changed(nodes=changed))
        return state.outbox.take()

    def _sweep(self) -> None:
        state = self._state
        self._swept_at = state.now
        for node in state.records_table.nodes():
            record = state.records_table.get(node)
            age_s = state.now - state.since.get(node, state.now)
            if record is not None and record.gone and age_s > MEMBER_TOMBSTONE_S:
                self._gossip.drop(node)
        for node, kept in list(state.remembered.items()):
            if state.now - kept.since > MEMBER_REMEMBER_S:
                del state.remembered[node]
                state.dialling.end(node)
