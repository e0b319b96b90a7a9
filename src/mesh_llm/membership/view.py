"""A node's view of the mesh. Events and the time go in, effects come out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mesh_llm.defaults import (
    MEMBER_CALM_S,
    MEMBER_DIALS_PER_TICK,
    MEMBER_JUMP_S,
    MEMBER_LATE_S,
    MEMBER_REMEMBER_S,
    MEMBER_SURPLUS_S,
    MEMBER_TOMBSTONE_S,
    MEMBER_VISITOR_S,
)
from mesh_llm.membership.effects import Changed, Connect, Disconnect, Effect
from mesh_llm.membership.failure_detector import Judge
from mesh_llm.membership.gossip import Gossip
from mesh_llm.membership.heartbeat import Link, digest_of
from mesh_llm.membership.member import Member, Standing
from mesh_llm.membership.messages import (
    NODES_LIMIT,
    Ack,
    Compare,
    Guest,
    Hears,
    Leave,
    Message,
    Ping,
    Summary,
    Update,
    Want,
)
from mesh_llm.membership.own_record import Own, Seal
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view_state import Open, Scene, Visitor
from mesh_llm.types import Address, NodeFacts, NodeId, Role

_SWEEP_S = 30.0
_NOWHERE = Address()


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
        self._scene = Scene(Own(record, seal), open, now=now, seed=seed, observes=observes)
        self._judge = Judge(self._scene)
        self._gossip = Gossip(self._scene, self._judge)
        self._pings = 0
        self._hears: frozenset[NodeId] = frozenset()
        self._hears_digest = digest_of(())
        self._swept_at = now

    # -- what it shows --------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody, this node, the dead, those who left, and clients connected here included, by id."""
        scene = self._scene
        nodes = {scene.me, *scene.ledger.nodes(), *scene.visitors}
        found = (scene.member(node) for node in sorted(nodes))
        return tuple(member for member in found if member is not None)

    def member(self, node: NodeId) -> Member | None:
        return self._scene.member(node)

    @property
    def records(self) -> tuple[Record, ...]:
        """Of nodes that are not gone, this one included: to be remembered over a restart (see `know`)."""
        ring = self._scene.ledger.ring
        return tuple(record for node in ring if (record := self._scene.ledger.get(node)) is not None)

    @property
    def all_records(self) -> tuple[Record, ...]:
        """Of everybody that was ever heard of, the dead and the remembered included."""
        scene = self._scene
        known = [record for node in scene.ledger.nodes() if (record := scene.ledger.get(node)) is not None]
        return (*known, *(kept.record for kept in scene.remembered.values()))

    def told(self, most: int, *, size_bytes: int) -> list[Told]:
        """The same as they travel, for one who is admitted: this node and those connected to it first."""
        scene = self._scene
        near = sorted(self.records, key=lambda r: (r.node != scene.me, r.node not in scene.links))
        found = [scene.told(record) for record in near[:most]]
        while len(found) > 1 and sum(told.size_bytes for told in found) > size_bytes:
            found.pop()
        return found

    @property
    def digest(self) -> int:
        """Equal where two views agree on who lives, and on all facts."""
        return self._scene.ledger.digest

    # -- what happens ---------------------------------------------------------------------------

    def on_connected(self, node: NodeId, now: float) -> list[Effect]:
        scene = self._begin(now)
        if node == scene.me:
            self._gossip.duplicate()
            scene.outbox.add(Disconnect(node=node, reason="it has this node's own id"))
            return self._finish()
        if scene.own.left:
            scene.outbox.add(Disconnect(node=node, reason="this node is leaving"))
            return self._finish()
        known = scene.ledger.get(node)
        if known is None or known.gone:
            # The network is back, or we are: others may be within reach again, too.
            scene.dialling.hasten(now)
        scene.dialling.end(node)
        scene.links[node] = link = Link(node, now)
        scene.touched.add(node)
        self._judge.heard(node)
        if scene.observes:
            scene.outbox.send(node, self._guest_message())
        else:
            doubted = known is not None and known.standing is not Standing.ALIVE
            scene.send(node, scene.own.record, *([known] if known and doubted else []))
        scene.outbox.send(node, self._hears_message())
        self._ping(link)
        if scene.me < node or scene.observes:
            self._gossip.sync(link)
        return self._finish()

    def on_visitor(self, node: NodeId, now: float) -> list[Effect]:
        """A lite client is connected: it is told what members know, and believed nothing about them."""
        scene = self._begin(now)
        facts = NodeFacts(name="", role=Role.CLIENT, version="")
        visitor = scene.visitors[node] = Visitor(link=Link(node, now), facts=facts)
        scene.touched.add(node)
        scene.outbox.send(node, self._hears_message())
        self._ping(visitor.link)
        return self._finish()

    def on_disconnected(self, node: NodeId, now: float) -> list[Effect]:
        scene = self._begin(now)
        if scene.visitors.pop(node, None) is not None:
            scene.touched.add(node)
        link = scene.links.pop(node, None)
        if link is not None and not scene.own.left:
            self._judge.closed(link)
            self._tell_hears()
        return self._finish()

    def on_message(self, sender: NodeId, message: Message, now: float) -> list[Effect]:
        scene = self._begin(now)
        if (visitor := scene.visitors.get(sender)) is not None:
            self._serve(visitor, message)
            return self._finish()
        link = scene.links.get(sender)
        if link is None or scene.own.left:
            return self._finish()
        link.heard_at = now
        self._judge.heard(sender)
        if scene.observes:
            self._gossip.revive(sender)
        self._receive(link, message)
        return self._finish()

    def _receive(self, link: Link, message: Message) -> None:
        match message:
            case Ping():
                self._on_ping(link, message)
            case Ack():
                link.answered(message.number, self._scene.now)
                if message.ask:
                    self._scene.outbox.send(link.node, self._hears_message())
                self._gossip.digest(link, message.incarnation, message.digest)
            case Hears():
                self._scene.touched |= link.told(message.nodes)
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

    def _serve(self, visitor: Visitor, message: Message) -> None:
        """Answer a client. What it may say is its name and how it is."""
        link = visitor.link
        link.heard_at = self._scene.now
        match message:
            case Ping():
                self._ack(link, message, ask=False)
            case Ack():
                link.answered(message.number, self._scene.now)
                if message.ask:
                    self._scene.outbox.send(link.node, self._hears_message())
            case Compare():
                self._gossip.compare(link, message)
            case Want():
                self._gossip.want(link, message)
            case Guest(name=name, version=version, state=state, reason=reason):
                visitor.facts = NodeFacts(
                    name=name, role=Role.CLIENT, version=version, state=state, reason=reason
                )
                self._scene.touched.add(link.node)

    def _on_ping(self, link: Link, message: Ping) -> None:
        link.kept = message.keep
        self._ack(link, message, ask=message.hears != link.hears_digest)
        self._gossip.digest(link, message.incarnation, message.digest)

    def _ack(self, link: Link, ping: Ping, *, ask: bool) -> None:
        self._scene.outbox.send(
            link.node,
            Ack(
                number=ping.number,
                incarnation=self._scene.own.record.incarnation,
                digest=self._scene.ledger.digest,
                ask=ask,
            ),
        )

    def on_left(self, node: NodeId, now: float) -> list[Effect]:
        """It closed its connection saying that it stops; others hear that from itself, or not at all."""
        scene = self._begin(now)
        known = scene.living(node)
        if known is not None and not scene.own.left:
            scene.ledger.put(known.said(Standing.LEFT))
            scene.touched.add(node)
            scene.restless = True
            self._gossip.gone(scene.ledger.get(node) or known)
        return self._finish()

    def on_tick(self, now: float) -> list[Effect]:
        scene = self._begin(now)
        if scene.own.left:
            return self._finish()
        self._choose()
        self._judge.look()
        for link in list(scene.links.values()):
            if link.ping_due(now):
                self._ping(link)
            self._release(link)
        self._look_at_visitors()
        self._tell_hears()
        self._dial()
        if now - self._swept_at >= _SWEEP_S:
            self._sweep()
        return self._finish()

    # -- what its node wants --------------------------------------------------------------------

    def publish(self, facts: NodeFacts, now: float) -> list[Effect]:
        scene = self._begin(now)
        before = scene.own.record.facts
        if not scene.own.left and scene.own.publish(facts):
            if before.address != facts.address:
                # Another network, or the old one again: whoever was out of reach may not be any longer.
                scene.dialling.hasten(now)
            scene.renewed()
            if scene.observes:
                for node in scene.links:
                    scene.outbox.send(node, self._guest_message())
        return self._finish()

    def know(self, records: Iterable[Record], now: float) -> list[Effect]:
        scene = self._begin(now)
        for record in records:
            if record.node != scene.me and record.node not in scene.ledger:
                self._gossip.remember(record)
        return self._finish()

    def forget(self, node: NodeId, now: float) -> list[Effect]:
        scene = self._begin(now)
        if node == scene.me:
            return self._finish()
        link = scene.links.pop(node, None)
        if link is not None:
            scene.touched |= link.hears
            scene.outbox.add(Disconnect(node=node, reason="it has been expelled"))
        scene.ledger.remove(node)
        scene.remembered.pop(node, None)
        scene.dialling.end(node)
        self._judge.gone(node)
        scene.touched.add(node)
        scene.restless = True
        self._tell_hears()
        return self._finish()

    def set_partners(self, nodes: Collection[NodeId]) -> list[Effect]:
        self._scene.partners = frozenset(nodes)
        self._scene.restless = True
        self._choose()
        self._dial()
        return self._finish()

    def leave(self, now: float) -> list[Effect]:
        scene = self._begin(now)
        if not scene.own.left:
            scene.own.leave()
            scene.touched.add(scene.me)
            if not scene.observes:
                scene.ledger.put(scene.own.record)
                for node in scene.listeners:
                    scene.outbox.send(node, Leave(record=scene.told(scene.own.record)))
        return self._finish()

    # -- parts of a step ------------------------------------------------------------------------

    def _begin(self, now: float) -> Scene:
        scene = self._scene
        gap_s = now - scene.now
        scene.now = now
        if not 0 <= gap_s <= MEMBER_JUMP_S:
            # It was us who slept: judge nobody by it, and look for everybody anew.
            self._judge.calm(now + min(MEMBER_CALM_S, 2 * abs(gap_s)))
            scene.dialling.hasten(now)
            self._swept_at = min(self._swept_at, now)
        elif gap_s > MEMBER_LATE_S:
            self._judge.excuse(gap_s - MEMBER_LATE_S)
        return scene

    def _finish(self) -> list[Effect]:
        scene = self._scene
        if scene.restless and not scene.own.left:
            self._choose()
        if not scene.own.left:
            scene.outbox.flush(scene.news, scene.listeners, scene.now)
        changed = scene.changed() if scene.touched else ()
        if changed:
            scene.outbox.add(Changed(nodes=changed))
        return scene.outbox.take()

    def _choose(self) -> None:
        scene = self._scene
        if scene.restless:
            scene.restless = False
            for node in scene.choose():
                if node not in scene.links:
                    scene.dialling.begin(node, scene.now)

    def _ping(self, link: Link) -> None:
        self._pings += 1
        link.pinged(self._pings, self._scene.now)
        ping = Ping(
            number=self._pings,
            incarnation=self._scene.own.record.incarnation,
            digest=self._scene.ledger.digest,
            hears=self._hears_digest,
            keep=link.node in self._scene.wanted,
        )
        self._scene.outbox.send(link.node, ping)

    def _release(self, link: Link) -> None:
        """A connection that neither side wants is closed after a while; both know, and nobody is doubted."""
        scene = self._scene
        if link.kept or link.node in scene.wanted or scene.living(link.node) is None:
            link.surplus_since = None
        elif link.surplus_since is None:
            link.surplus_since = scene.now
        elif scene.now - link.surplus_since >= MEMBER_SURPLUS_S:
            del scene.links[link.node]
            scene.touched |= {link.node} | link.hears
            scene.outbox.add(Disconnect(node=link.node, reason="neither side needs it"))

    def _tell_hears(self) -> None:
        scene = self._scene
        hears = frozenset(node for node in scene.links if scene.heard(node))
        if hears != self._hears:
            self._hears, self._hears_digest = hears, digest_of(sorted(hears)[:NODES_LIMIT])
            message = self._hears_message()
            for node in scene.listeners:
                scene.outbox.send(node, message)

    def _hears_message(self) -> Hears:
        return Hears(nodes=tuple(sorted(self._hears))[:NODES_LIMIT])

    def _guest_message(self) -> Guest:
        facts = self._scene.own.record.facts
        return Guest(name=facts.name, version=facts.version, state=facts.state, reason=facts.reason)

    def _look_at_visitors(self) -> None:
        scene = self._scene
        for node, visitor in list(scene.visitors.items()):
            if visitor.link.ping_due(scene.now):
                self._ping(visitor.link)
            if visitor.link.silence(scene.now) >= MEMBER_VISITOR_S:
                del scene.visitors[node]
                scene.touched.add(node)
                scene.outbox.add(Disconnect(node=node, reason="it is silent"))

    def _dial(self) -> None:
        scene = self._scene
        for _ in range(MEMBER_DIALS_PER_TICK):
            node = scene.dialling.due(scene.now)
            if node is None:
                return
            record = scene.ledger.get(node)
            kept = scene.remembered.get(node)
            if record is None and kept is not None:
                record = kept.record
            left = record is not None and record.standing is Standing.LEFT and not scene.observes
            useless = record is None or left or node in scene.links
            far = scene.living(node) is not None and node not in scene.wanted
            if useless or far or record is None:
                scene.dialling.end(node)
            elif record.facts.address != _NOWHERE:
                scene.outbox.add(Connect(node=node, address=record.facts.address))

    def _sweep(self) -> None:
        scene = self._scene
        self._swept_at = scene.now
        for node in scene.ledger.nodes():
            record = scene.ledger.get(node)
            age_s = scene.now - scene.since.get(node, scene.now)
            if record is not None and record.gone and age_s > MEMBER_TOMBSTONE_S:
                self._gossip.drop(node)
        for node, kept in list(scene.remembered.items()):
            if scene.now - kept.since > MEMBER_REMEMBER_S:
                del scene.remembered[node]
                scene.dialling.end(node)
