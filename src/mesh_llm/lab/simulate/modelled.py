"""A few whole views in a mesh of ten thousand whose other members are modelled.

The views are the real code, and hear from their neighbours what they would in a mesh of whole views: a
modelled member answers pings with the digest that it would have, asks and answers when tables are compared,
and announces news to the views among its neighbours once it knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.distributions import (
    FACTS_CHANGE_S,
    LEAVES,
    DrawnNode,
    departures_per_s,
    draw_arriving,
    draw_departing,
    draw_nodes,
    with_links,
)
from mesh_llm.lab.simulate.events import EventQueue
from mesh_llm.lab.simulate.measures import Rate, mistaken, per_node_second
from mesh_llm.lab.simulate.network import Scales
from mesh_llm.lab.simulate.others import ModelledMembers, TravellingNews, sealed
from mesh_llm.lab.simulate.signing import opened, seal
from mesh_llm.membership.effects import Connect, Disconnect, Effect, Send
from mesh_llm.membership.failure_detector import MEMBER_DEAD_S
from mesh_llm.membership.gossip import MEMBER_SYNC_S, sync_s
from mesh_llm.membership.heartbeat import MEMBER_PING_S, digest_of
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import (
    ENTRY_LIMIT,
    Ack,
    Compare,
    Hears,
    Message,
    Ping,
    Summary,
    Want,
)
from mesh_llm.membership.outbox import updates
from mesh_llm.membership.record import Record, told
from mesh_llm.membership.view import View
from mesh_llm.types import NodeId

TICK_S = 0.25
SETTLE_S = 4.0
QUIET_S = 4.0


@frozen
class ModelledCase:
    nodes: int
    views: int
    quiet: Rate
    """Of the views: half of what they send and receive."""
    churn: Rate
    churn_mistaken: float
    arrival_s: tuple[float, ...]
    """Of a piece of news, at the views: from the change on."""
    bytes_of: dict[str, float]
    """In churn, by the kind of message, for each view and second."""


@dataclass(slots=True)
class _Link:
    """Between a view and a modelled neighbour, on the neighbour's side."""

    differs_since: float | None = None
    synced_at: float = float("-inf")
    pings: int = 0


@dataclass(slots=True)
class _Viewer:
    view: View
    links: dict[NodeId, _Link] = field(default_factory=dict)


class ModelledMesh(EventQueue):
    def __init__(self, seed: int, count: int, views: int) -> None:
        super().__init__(now=1000.0)
        self.random = Random(seed)
        self.scales = Scales(7)
        nodes = with_links(draw_nodes(self.random, count))
        self._count = count
        self._announced: dict[tuple[NodeId, NodeId, float], list[NodeId]] = {}
        """What a member announces to a view at a time."""
        self._others = ModelledMembers(nodes)
        self.viewers = {
            node.id: _Viewer(self._a_view(node)) for node in self.random.sample(nodes, min(views, count // 2))
        }
        self._warm()

    def _a_view(self, node: DrawnNode) -> View:
        return View(
            node.id,
            incarnation=1,
            facts=node.facts,
            now=self.now,
            seed=self.random.getrandbits(64),
            seal=seal,
            open=opened,
        )

    def _warm(self) -> None:
        """Every view knows everybody, and has its connections."""
        batches = updates(told(self._record(id)) for id in self._others.table.ring)
        for id, viewer in self.viewers.items():
            teacher = min(self._others.edges[id])
            viewer.view.on_connected(teacher, self.now)
            for batch in batches:
                viewer.view.on_message(teacher, batch, self.now)
            viewer.links[teacher] = _Link()
        self.now += 0.1
        for id, viewer in self.viewers.items():
            viewer.view.on_tick(self.now)
            for other in sorted(self._others.edges[id]):
                self._link(id, other)
            self.after(self.random.random() * TICK_S, partial(self._tick, id))
        self.run(SETTLE_S)

    # -- views ----------------------------------------------------------------------------------

    def _tick(self, id: NodeId) -> None:
        self._perform(id, self.viewers[id].view.on_tick(self.now))
        self.after(TICK_S * self.random.uniform(0.95, 1.05), partial(self._tick, id))

    def _perform(self, id: NodeId, effects: Iterable[Effect]) -> None:
        viewer = self.viewers[id]
        for effect in effects:
            if isinstance(effect, Send) and effect.to in viewer.links:
                message = self.scales.weighed(id, effect.to, effect.message)
                self.after(self._others.delay_s(id, effect.to), partial(self._answer, id, effect.to, message))
            elif isinstance(effect, Connect) and effect.node in self._others.table.ring:
                self.after(self._others.delay_s(id, effect.node), partial(self._link, id, effect.node))
            elif isinstance(effect, Disconnect):
                viewer.links.pop(effect.node, None)

    def _link(self, id: NodeId, other: NodeId) -> None:
        viewer = self.viewers[id]
        if (other in viewer.links and self.now > 1001.0) or not self._others.alive(other):
            return
        if other not in viewer.links:
            viewer.links[other] = _Link()
            self._perform(id, viewer.view.on_connected(other, self.now))
        self._say(other, id, Hears(nodes=self._others.hears(other)))
        self.after(self.random.random() * MEMBER_PING_S, partial(self._ping, other, id))

    def _deliver(self, sender: NodeId, id: NodeId, message: Message) -> None:
        if sender in self.viewers[id].links and self._others.alive(sender):
            self._perform(id, self.viewers[id].view.on_message(sender, message, self.now))

    # -- modelled members -----------------------------------------------------------------------

    def _say(self, sender: NodeId, id: NodeId, message: Message) -> None:
        """To a view; another view among its neighbours speaks for itself in nothing but this."""
        message = self.scales.weighed(sender, id, message)
        self.after(self._others.delay_s(sender, id), partial(self._deliver, sender, id, message))

    def _ping(self, sender: NodeId, id: NodeId) -> None:
        link = self.viewers[id].links.get(sender)
        if link is None or not self._others.alive(sender):
            return
        link.pings += 1
        ping = Ping(
            number=link.pings,
            incarnation=self._others.incarnation(sender),
            digest=self._others.digest(sender, self.now),
            hears=digest_of(self._others.hears(sender)),
            keep=True,
        )
        self._say(sender, id, ping)
        self.after(MEMBER_PING_S, partial(self._ping, sender, id))

    def _answer(self, id: NodeId, me: NodeId, message: Message) -> None:
        """What a modelled member does with a message of a view."""
        link = self.viewers[id].links.get(me)
        if link is None or not self._others.alive(me):
            return
        match message:
            case Ping():
                incarnation, digest = self._others.incarnation(me), self._others.digest(me, self.now)
                self._say(me, id, Ack(number=message.number, incarnation=incarnation, digest=digest))
                self._compare_digests(id, me, link, message.digest)
            case Ack():
                if message.ask:
                    self._say(me, id, Hears(nodes=self._others.hears(me)))
                self._compare_digests(id, me, link, message.digest)
            case Compare():
                link.synced_at = self.now
                table = self._others.table
                for summary in table.summaries(table.differing(message), ENTRY_LIMIT):
                    self._say(me, id, summary)
            case Summary():
                self._on_summary(id, me, message)
            case Want():
                records = (self._others.table.get(node) for node in message.nodes)
                for update in updates(told(record) for record in records if record is not None):
                    self._say(me, id, update)

    def _on_summary(self, id: NodeId, me: NodeId, message: Summary) -> None:
        if message.buckets:
            give, _ = self._others.table.reply(message)
            for update in updates(map(told, give)):
                self._say(me, id, update)
            return
        # An announcement: asked for by whoever hears of it here first.
        wanted = [entry.node for entry in message.entries if self._others.source(entry.node, me) == id]
        if wanted:
            self._say(me, id, Want(nodes=tuple(wanted)))

    def _compare_digests(self, id: NodeId, me: NodeId, link: _Link, digest: int) -> None:
        """As `membership.gossip` does."""
        settle_s = MEMBER_SYNC_S if me < id else 2 * MEMBER_SYNC_S
        pause_s = max(settle_s, sync_s(len(self._others.table.ring)))
        if digest == self._others.digest(me, self.now):
            link.differs_since = None
        elif link.differs_since is None:
            link.differs_since = self.now
        elif self.now - link.differs_since >= settle_s and self.now - link.synced_at >= pause_s:
            link.synced_at = self.now
            self._say(me, id, self._others.table.compare())

    # -- news -----------------------------------------------------------------------------------

    def _spread(self, news: TravellingNews, origins: Collection[NodeId]) -> None:
        """Modelled neighbours of views tell them when they know."""
        subject = news.record.node
        for id, viewer in self.viewers.items():
            for other in viewer.links:
                told_by_view = news.source.get(other) == id or other in self.viewers
                if other not in news.arrives or told_by_view:
                    continue
                at = max(self.now, news.arrives[other])
                if news.record.gone or other in origins:
                    self.at(at, partial(self._tell, other, id, news.told()))
                else:
                    self._announce(other, id, subject, self._others.announces_at(other, at))

    def _announce(self, sender: NodeId, id: NodeId, subject: NodeId, at: float) -> None:
        """With what else it announces at that moment."""
        together = self._announced.setdefault((sender, id, at), [])
        together.append(subject)
        if len(together) > 1:
            return

        def send() -> None:
            self._tell(sender, id, self._others.announcement(self._announced.pop((sender, id, at))))

        self.at(at, send)

    def _tell(self, sender: NodeId, id: NodeId, message: Message) -> None:
        if sender in self.viewers[id].links and self._others.alive(sender):
            self._say(sender, id, message)

    # -- what happens ---------------------------------------------------------------------------

    def change(self) -> None:
        """A member tells something new of itself."""
        id = self._somebody()
        old = self._record(id)
        facts = replace(old.facts, lent_bytes=self.random.randrange(1, 1 << 30))
        new = sealed(replace(old, sequence=old.sequence + 1, facts=facts))
        self._spread(self._others.spread(new, {id}, self.now), {id})

    def arrive(self) -> None:
        node = draw_arriving(self.random, self._count)
        self._count += 1
        self._spread(self._others.add(node, self.now), {node.id})

    def depart(self) -> None:
        """One leaves, or crashes: then its neighbours are sure after a while."""
        ring, nodes = self._others.table.ring, self._others.nodes
        id = draw_departing(self.random, [nodes[id] for id in ring if id not in self.viewers]).id
        old = self._record(id)
        if self.random.random() < LEAVES:
            self._end(sealed(replace(old, sequence=old.sequence + 1, standing=Standing.LEFT, left=True)))
        else:
            for viewer in self.viewers.values():
                viewer.links.pop(id, None)
            found_s = MEMBER_DEAD_S + self.random.random() * TICK_S
            self.after(found_s, lambda: self._end(old.said(Standing.DEAD)))

    def _end(self, record: Record) -> None:
        id = record.node
        neighbours = self._others.edges[id] - {id}
        self._spread(self._others.spread(record, neighbours, self.now), neighbours)
        self._others.remove(id)
        for viewer_id, viewer in self.viewers.items():
            if viewer.links.pop(id, None) is not None:
                self._perform(viewer_id, viewer.view.on_disconnected(id, self.now))

    def _record(self, id: NodeId) -> Record:
        record = self._others.table.get(id)
        assert record is not None
        return record

    def _somebody(self) -> NodeId:
        while True:
            id = self.random.choice(self._others.table.ring)
            if id not in self.viewers:
                return id

    # -- what there is to see -------------------------------------------------------------------

    def mistaken(self) -> float:
        ring = self._others.table.ring
        some = self.random.sample(sorted(self.viewers), min(10, len(self.viewers)))
        present = ([member.id for member in self.viewers[id].view.members if member.present] for id in some)
        return mistaken(present, ring)

    def again_and_again(self, per_s: float, what: Callable[[], None], until: float) -> None:
        at = self.now + self.random.expovariate(per_s)

        def happen() -> None:
            what()
            self.again_and_again(per_s, what, until)

        if at < until:
            self.at(at, happen)

    def departures_per_s(self) -> float:
        return departures_per_s([self._others.nodes[id] for id in self._others.table.ring])

    def latest_arrivals(self) -> list[float]:
        """Of the news that is remembered: from the change until each view has it."""
        known = [(news, id) for news in self._others.news for id in self.viewers if id in news.arrives]
        return [news.arrives[id] - news.begun for news, id in known]


def modelled_case(
    seed: int, count: int, *, views: int, churn_s: float, say: Callable[[str], None]
) -> ModelledCase:
    say(f"{count} nodes: {views} views that know all of them")
    mesh = ModelledMesh(seed, count, views)
    views = len(mesh.viewers)
    before, sent = mesh.scales.messages, _bytes(mesh)
    mesh.run(QUIET_S)
    quiet = per_node_second(mesh.scales.messages - before, _bytes(mesh) - sent, 2 * views, QUIET_S)
    say(f"{count} nodes: {churn_s:.0f} s of churn")
    goes, until = mesh.departures_per_s(), mesh.now + churn_s
    for per_s, what in ((goes, mesh.depart), (goes, mesh.arrive), (count / FACTS_CHANGE_S, mesh.change)):
        mesh.again_and_again(per_s, what, until)
    before, sent, kinds = mesh.scales.messages, _bytes(mesh), mesh.scales.bytes_of.copy()
    arrivals, wrong = [], []
    while mesh.now < until:
        mesh.run(min(5.0, until - mesh.now))
        arrivals += mesh.latest_arrivals()
        wrong.append(mesh.mistaken())
    spent = mesh.scales.bytes_of - kinds
    return ModelledCase(
        nodes=count,
        views=views,
        quiet=quiet,
        churn=per_node_second(mesh.scales.messages - before, _bytes(mesh) - sent, 2 * views, churn_s),
        churn_mistaken=sum(wrong) / max(1, len(wrong)),
        arrival_s=tuple(arrivals),
        bytes_of={kind: size / (2 * views) / churn_s for kind, size in spent.items()},
    )


def _bytes(mesh: ModelledMesh) -> int:
    return sum(mesh.scales.bytes_of.values())
