"""Who lives: evidence of our own, suspicion, and death.

A connection that is silent or closed raises a doubt, which everybody is told. It ends when the node
is heard again, when a neighbour hears it, or when the node refutes it with a higher incarnation;
otherwise the node is dead. A member that we should be connected to, and are not, and that no
neighbour hears, is doubted too, with more patience: it may live out of our reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.defaults import (
    MEMBER_DEAD_S,
    MEMBER_GRACE_S,
    MEMBER_HEARSAY_GRACE_S,
    MEMBER_PATIENCE_LIMIT_S,
    MEMBER_PATIENCE_S,
    MEMBER_SUSPECT_S,
    MEMBER_VOUCH_S,
)
from mesh_llm.membership.effects import Disconnect
from mesh_llm.membership.heartbeat import Link
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record
from mesh_llm.membership.view_state import Doubt, Scene
from mesh_llm.types import NodeId


@dataclass(slots=True, kw_only=True)
class _Unreached:
    since: float
    patience_s: float = MEMBER_PATIENCE_S


class Judge:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._unreached: dict[NodeId, _Unreached] = {}
        self._calm_until = float("-inf")

    def calm(self, until: float) -> None:
        """We slept: nobody is called dead before `until`."""
        scene = self._scene
        self._calm_until = until
        for link in [*scene.links.values(), *(visitor.link for visitor in scene.visitors.values())]:
            link.restart(scene.now)
        for doubt in scene.doubts.values():
            doubt.dead_at = until
            doubt.vouch_at = scene.now
        for unreached in self._unreached.values():
            unreached.since = scene.now

    def excuse(self, missed_s: float) -> None:
        """We were kept from listening for so long: nobody has been silent meanwhile."""
        scene = self._scene
        for link in scene.links.values():
            link.heard_at = min(scene.now, link.heard_at + missed_s)
        for doubt in scene.doubts.values():
            doubt.dead_at += missed_s
        for unreached in self._unreached.values():
            unreached.since = min(scene.now, unreached.since + missed_s)

    def closed(self, link: Link) -> None:
        """A connection is gone."""
        scene, node = self._scene, link.node
        scene.touched.add(node)
        scene.touched |= link.hears
        if scene.living(node) is None:
            if scene.observes:
                # Nobody dials a client: it has to notice itself when one that left is back.
                scene.dialling.begin(node, scene.now)
            return
        if node in scene.wanted:
            scene.dialling.begin(node, scene.now, again=True)
        if node in scene.wanted or link.kept:
            self._doubt(node, scene.now + MEMBER_GRACE_S, vouch_at=scene.now + MEMBER_VOUCH_S)

    def heard(self, node: NodeId) -> None:
        """A word from the node itself, or a higher incarnation of it by gossip."""
        self._unreached.pop(node, None)
        if self._scene.doubts.pop(node, None) is not None:
            self._scene.touched.add(node)

    def renewed(self, record: Record) -> None:
        """Gossip brought a new incarnation: it lives, within reach or not."""
        doubt = self._scene.doubts.get(record.node)
        if doubt is not None and record.incarnation > doubt.incarnation:
            del self._scene.doubts[record.node]
            self._scene.touched.add(record.node)
            link = self._scene.links.get(record.node)
            if link is not None and link.silence(self._scene.now) >= MEMBER_DEAD_S:
                # It answers everybody but us: doubts that it refutes at once would follow with every tick.
                self._drop(link, "it is silent")
        unreached = self._unreached.get(record.node)
        if unreached is not None:
            unreached.since = self._scene.now

    def gone(self, node: NodeId) -> None:
        self._scene.doubts.pop(node, None)
        self._unreached.pop(node, None)

    def look(self) -> None:
        """Once per tick."""
        for link in list(self._scene.links.values()):
            self._look_at_link(link)
        for node, doubt in list(self._scene.doubts.items()):
            self._look_at_doubt(node, doubt)
        self._unreached = {node: one for node, one in self._unreached.items() if node in self._scene.wanted}
        for node in self._scene.wanted:
            if node not in self._scene.links:
                self._look_at_unreached(node)

    def _look_at_link(self, link: Link) -> None:
        scene = self._scene
        silence_s = link.silence(scene.now)
        if silence_s < MEMBER_SUSPECT_S:
            return
        if scene.living(link.node) is not None and not scene.vouchers(link.node):
            if link.node not in scene.doubts:
                last = max(scene.now + MEMBER_GRACE_S, link.heard_at + MEMBER_DEAD_S)
                self._doubt(link.node, last, vouch_at=scene.now)
                scene.touched |= link.hears
            if scene.now >= self._calm_until:
                return
        if silence_s >= MEMBER_DEAD_S:
            # Others hear it, or we slept, or it never said who it is: a new connection may do better.
            self._drop(link, "it is silent")

    def _look_at_doubt(self, node: NodeId, doubt: Doubt) -> None:
        scene = self._scene
        if scene.now >= doubt.vouch_at and scene.vouchers(node):
            del scene.doubts[node]
            scene.touched.add(node)
        elif scene.now >= doubt.dead_at:
            self._bury(node)

    def _look_at_unreached(self, node: NodeId) -> None:
        scene = self._scene
        if node in scene.doubts:
            return
        if scene.vouchers(node):
            self._unreached.pop(node, None)
            return
        unreached = self._unreached.setdefault(node, _Unreached(since=scene.now))
        if scene.now - unreached.since >= unreached.patience_s:
            unreached.since = scene.now
            unreached.patience_s = min(2 * unreached.patience_s, MEMBER_PATIENCE_LIMIT_S)
            self._doubt(node, scene.now + MEMBER_HEARSAY_GRACE_S, vouch_at=scene.now)

    def _doubt(self, node: NodeId, dead_at: float, *, vouch_at: float) -> None:
        scene = self._scene
        record = scene.ledger.get(node)
        assert record is not None
        dead_at = max(dead_at, self._calm_until)
        scene.doubts[node] = Doubt(incarnation=record.incarnation, dead_at=dead_at, vouch_at=vouch_at)
        scene.touched.add(node)
        if record.standing is Standing.ALIVE:
            scene.ledger.put(record.said(Standing.SUSPECT))
            scene.outbox.tell(node, None)

    def _bury(self, node: NodeId) -> None:
        scene = self._scene
        link = scene.links.get(node)
        record = scene.ledger.get(node)
        assert record is not None
        scene.ledger.put(record.said(Standing.DEAD))
        scene.outbox.tell(node, None)
        scene.touched.add(node)
        self.gone(node)
        scene.restless = True
        if link is not None:
            self._drop(link, "it is silent")
        scene.dialling.begin(node, scene.now)

    def _drop(self, link: Link, reason: str) -> None:
        scene = self._scene
        del scene.links[link.node]
        scene.outbox.add(Disconnect(node=link.node, reason=reason))
        scene.touched.add(link.node)
        scene.touched |= link.hears
        scene.dialling.begin(link.node, scene.now)
