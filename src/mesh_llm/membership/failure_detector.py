"""Who lives: evidence of our own, suspicion, and death.

A connection that is silent or closed raises a doubt, which everybody is told. It ends when the node
is heard again, when a neighbour hears it, or when the node refutes it with a higher incarnation;
otherwise the node is dead. A member that we should be connected to, and are not, and that no
neighbour hears, is doubted too, with more patience: it may live out of our reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.membership.effects import Disconnect
from mesh_llm.membership.heartbeat import Heartbeat
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record
from mesh_llm.membership.view_state import Doubt, ViewState
from mesh_llm.types import NodeId

MEMBER_SUSPECT_S = 1.9
"""Of silence on a connection: two pings and three hurried ones went unanswered."""
MEMBER_DEAD_S = 2.6
"""Of silence: a tick later it is still less than three seconds after the last word."""
MEMBER_GRACE_S = 0.6
"""From suspicion to death at least, and all of it after a connection was closed: time to refute it."""
MEMBER_VOUCH_S = 0.25
"""After a connection closed: others need a moment to notice the same before their word counts."""
MEMBER_PATIENCE_S = 5.0
"""For a member that, as only others tell, is connected or heard by a neighbour."""
MEMBER_PATIENCE_LIMIT_S = 120.0
"""Patience doubles whenever it answers by gossip: it lives, just not within reach."""
MEMBER_SECOND_HAND_GRACE_S = 5.0
"""For the answer of such a member to come back through a thousand nodes."""


@dataclass(slots=True, kw_only=True)
class _Unreached:
    since: float
    patience_s: float = MEMBER_PATIENCE_S


class FailureDetector:
    def __init__(self, state: ViewState) -> None:
        self._state = state
        self._unreached: dict[NodeId, _Unreached] = {}
        self._calm_until = float("-inf")

    def calm(self, until: float) -> None:
        """We slept: nobody is called dead before `until`."""
        state = self._state
        self._calm_until = until
        for link in [*state.links.values(), *(visitor.link for visitor in state.visitors.values())]:
            link.restart(state.now)
        for doubt in state.doubts.values():
            doubt.dead_at = until
            doubt.vouch_at = state.now
        for unreached in self._unreached.values():
            unreached.since = state.now

    def excuse(self, missed_s: float) -> None:
        """We were kept from listening for so long: nobody has been silent meanwhile."""
        state = self._state
        for link in state.links.values():
            link.heard_at = min(state.now, link.heard_at + missed_s)
        for doubt in state.doubts.values():
            doubt.dead_at += missed_s
        for unreached in self._unreached.values():
            unreached.since = min(state.now, unreached.since + missed_s)

    def closed(self, link: Heartbeat) -> None:
        """A connection is gone."""
        state, node = self._state, link.node
        state.touched.add(node)
        state.touched |= link.hears
        if state.living(node) is None:
            if state.observes:
                # Nobody dials a client: it has to notice itself when one that left is back.
                state.dialling.begin(node, state.now)
            return
        if node in state.wanted:
            state.dialling.begin(node, state.now, again=True)
        if node in state.wanted or link.kept:
            self._doubt(node, state.now + MEMBER_GRACE_S, vouch_at=state.now + MEMBER_VOUCH_S)

    def heard(self, node: NodeId) -> None:
        """A word from the node itself, or a higher incarnation of it by gossip."""
        self._unreached.pop(node, None)
        if self._state.doubts.pop(node, None) is not None:
            self._state.touched.add(node)

    def renewed(self, record: Record) -> None:
        """Gossip brought a new incarnation: it lives, within reach or not."""
        doubt = self._state.doubts.get(record.node)
        if doubt is not None and record.incarnation > doubt.incarnation:
            del self._state.doubts[record.node]
            self._state.touched.add(record.node)
            link = self._state.links.get(record.node)
            if link is not None and link.silence(self._state.now) >= MEMBER_DEAD_S:
                # It answers everybody but us: doubts that it refutes at once would follow with every tick.
                self._drop(link, "it is silent")
        unreached = self._unreached.get(record.node)
        if unreached is not None:
            unreached.since = self._state.now

    def gone(self, node: NodeId) -> None:
        self._state.doubts.pop(node, None)
        self._unreached.pop(node, None)

    def look(self) -> None:
        """Once per tick."""
        for link in list(self._state.links.values()):
            self._look_at_link(link)
        for node, doubt in list(self._state.doubts.items()):
            self._look_at_doubt(node, doubt)
        self._unreached = {node: one for node, one in self._unreached.items() if node in self._state.wanted}
        for node in self._state.wanted:
            if node not in self._state.links:
                self._look_at_unreached(node)

    def _look_at_link(self, link: Heartbeat) -> None:
        state = self._state
        silence_s = link.silence(state.now)
        if silence_s < MEMBER_SUSPECT_S:
            return
        if state.living(link.node) is not None and not state.vouchers(link.node):
            if link.node not in state.doubts:
                last = max(state.now + MEMBER_GRACE_S, link.heard_at + MEMBER_DEAD_S)
                self._doubt(link.node, last, vouch_at=state.now)
                state.touched |= link.hears
            if state.now >= self._calm_until:
                return
        if silence_s >= MEMBER_DEAD_S:
            # Others hear it, or we slept, or it never said who it is: a new connection may do better.
            self._drop(link, "it is silent")

    def _look_at_doubt(self, node: NodeId, doubt: Doubt) -> None:
        state = self._state
        if state.now >= doubt.vouch_at and state.vouchers(node):
            del state.doubts[node]
            state.touched.add(node)
        elif state.now >= doubt.dead_at:
            self._bury(node)

    def _look_at_unreached(self, node: NodeId) -> None:
        state = self._state
        if node in state.doubts:
            return
        if state.vouchers(node):
            self._unreached.pop(node, None)
            return
        unreached = self._unreached.setdefault(node, _Unreached(since=state.now))
        if state.now - unreached.since >= unreached.patience_s:
            unreached.since = state.now
            unreached.patience_s = min(2 * unreached.patience_s, MEMBER_PATIENCE_LIMIT_S)
            self._doubt(node, state.now + MEMBER_SECOND_HAND_GRACE_S, vouch_at=state.now)

    def _doubt(self, node: NodeId, dead_at: float, *, vouch_at: float) -> None:
        state = self._state
        record = state.records_table.get(node)
        assert record is not None
        dead_at = max(dead_at, self._calm_until)
        state.doubts[node] = Doubt(incarnation=record.incarnation, dead_at=dead_at, vouch_at=vouch_at)
        state.touched.add(node)
        if record.standing is Standing.ALIVE:
            state.records_table.put(record.said(Standing.SUSPECT))
            state.outbox.tell(node, None)

    def _bury(self, node: NodeId) -> None:
        state = self._state
        link = state.links.get(node)
        record = state.records_table.get(node)
        assert record is not None
        state.records_table.put(record.said(Standing.DEAD))
        state.outbox.tell(node, None)
        state.touched.add(node)
        self.gone(node)
        state.restless = True
        if link is not None:
            self._drop(link, "it is silent")
        state.dialling.begin(node, state.now)

    def _drop(self, link: Heartbeat, reason: str) -> None:
        state = self._state
        del state.links[link.node]
        state.outbox.add(Disconnect(node=link.node, reason=reason))
        state.touched.add(link.node)
        state.touched |= link.hears
        state.dialling.begin(link.node, state.now)
