"""A world of simulated nodes around `View`: connections, delay, loss, partitions, sleep and death.

Events happen in the order of their time, and chance comes from a seed: a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from mesh_llm.lab.simulate.events import EventQueue
from mesh_llm.lab.simulate.network import Between, Scales, SimulatedNetwork
from mesh_llm.lab.simulate.signing import NoSigning, RealSigning, node_id
from mesh_llm.membership.effects import Changed, Connect, Disconnect, Duplicate, Effect, Send
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import Message
from mesh_llm.membership.outbox import updates
from mesh_llm.membership.record import Record
from mesh_llm.membership.ring import chosen
from mesh_llm.membership.view import View
from mesh_llm.types import Address, NodeFacts, NodeId, Role


def facts(name: object, **others: object) -> NodeFacts:
    known: dict[str, object] = {"name": str(name), "role": Role.NODE, "version": "1.0"}
    known["address"] = Address(direct=("192.0.2.1:7777",))
    return NodeFacts(**{**known, **others})  # type: ignore[arg-type]


@dataclass
class SimulatedHost:
    """A process that may die, sleep, and be started again."""

    key: object
    """Distinct for two processes with the same id."""
    id: NodeId
    view: View
    born: float
    running: bool = True
    asleep: bool = False
    peers: set[object] = field(default_factory=set)
    """Keys of hosts to which this side has a connection."""
    duplicates: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """A member's standing changed in somebody's view."""

    at: float
    viewer: object
    subject: NodeId
    standing: Standing | None


class World(EventQueue):
    def __init__(
        self,
        *,
        seed: int = 1,
        delay_s: float = 0.01,
        jitter_s: float = 0.01,
        loss: float = 0.0,
        tick_s: float = 0.25,
        weigh_every: int = 1,
        verify: bool = False,
        between: Between | None = None,
    ) -> None:
        """`between` gives the delay between two, or None where they cannot reach each other; without it
        all are `delay_s` apart."""
        super().__init__(now=1000.0)
        self.random = Random(seed)
        self.signing = RealSigning() if verify else NoSigning()
        self.loss, self.tick_s = loss, tick_s
        self.network = SimulatedNetwork(between or (lambda one, other: delay_s), jitter_s, self.random)
        self.scales = Scales(weigh_every)
        self.hosts: dict[object, SimulatedHost] = {}
        self.turns: list[Turn] = []
        self._standings: dict[tuple[object, NodeId], Standing | None] = {}
        self._lives = 0
        self._keys: dict[NodeId, dict[object, None]] = {}
        """Processes by id, in the order of their start."""

    # -- making and breaking --------------------------------------------------------------------

    def start(
        self,
        key: object,
        *,
        id: NodeId | None = None,
        know: Iterable[Record] = (),
        incarnation: int = 0,
        told: NodeFacts | None = None,
    ) -> SimulatedHost:
        """A process starts; again, if it was there before."""
        self._lives += 1
        me = id or self.signing.id_of(key)
        grown = incarnation or int(self.now * 1000) + self._lives
        view = View(
            me,
            incarnation=grown,
            facts=told or facts(key),
            now=self.now,
            seed=self.random.getrandbits(64),
            seal=self.signing.seal(key),
            open=self.signing.open(),
        )
        host = self.hosts[key] = SimulatedHost(key=key, id=me, view=view, born=self.now)
        self._keys.setdefault(me, {})[key] = None
        self.perform(host, view.know(know, self.now))
        self.at(self.now + self.random.random() * self.tick_s, lambda: self._tick(host))
        return host

    def crash(self, key: object, *, closes: bool = False) -> None:
        """Killed; `closes` where its connections are seen to close (a TCP reset, a QUIC close)."""
        host = self.hosts[key]
        host.running = False
        for peer in list(host.peers) if closes else []:
            self._close_far_side(host, peer)
        host.peers.clear()

    def leave(self, key: object) -> None:
        host = self.hosts[key]
        self.perform(host, host.view.leave(self.now))
        self.at(self.now + 0.1, lambda: self.crash(key, closes=True))

    def sleep(self, key: object, seconds: float) -> None:
        host = self.hosts[key]
        host.asleep = True
        self.at(self.now + seconds, lambda: setattr(host, "asleep", False))

    def link(self, one: object, other: object) -> None:
        """Have two connected now."""
        for near, far in ((self.hosts[one], self.hosts[other]), (self.hosts[other], self.hosts[one])):
            if far.key not in near.peers:
                near.peers.add(far.key)
                self.perform(near, near.view.on_connected(far.id, self.now))

    def disconnect(self, one: object, other: object) -> None:
        """A connection breaks, and both sides see it."""
        self._close_side(self.hosts[one], other)
        self._close_side(self.hosts[other], one)

    def warm(self) -> None:
        """Everybody knows everybody and has its connections: a mesh that has been up for a while."""
        records = [host.view.told(1, size_bytes=1)[0] for host in self.hosts.values()]
        batches = updates(records)
        ring = sorted(host.id for host in self.hosts.values())
        by_id = {host.id: host for host in self.hosts.values()}
        wanted = {host.key: sorted(chosen(host.id, ring)) for host in self.hosts.values()}
        for host in self.hosts.values():
            teacher = wanted[host.key][0]
            host.view.on_connected(teacher, self.now)
            for batch in batches:
                host.view.on_message(teacher, batch, self.now)
            host.peers.add(by_id[teacher].key)
        self.now += 0.1
        for host in self.hosts.values():
            # What it would tell on now is known.
            host.view.on_tick(self.now)
        for key, others in wanted.items():
            for other in others:
                self.link(key, by_id[other].key)

    # -- what there is to see -------------------------------------------------------------------

    @property
    def up(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.running]

    def standing(self, viewer: object, subject: object) -> Standing | None:
        host = self.hosts.get(subject)
        member = self.hosts[viewer].view.member(host.id if host else node_id(subject))
        return None if member is None else member.standing

    def agreed(self, keys: Iterable[object] | None = None) -> bool:
        """Whether these (all that run) see each other, and nobody else, alive, and with the same facts."""
        hosts = self.up if keys is None else [self.hosts[key] for key in keys]
        if len({host.view.digest for host in hosts}) != 1:
            return False
        # Equal digests: they agree with the first one. Suspicion is each one's own.
        ids = sorted(host.id for host in hosts)
        keys = {host.key for host in hosts}
        doubted = any(
            standing is Standing.SUSPECT and viewer in keys
            for (viewer, _), standing in self._standings.items()
        )
        return not doubted and [m.id for m in hosts[0].view.members if m.present] == ids

    def turns_to(self, standing: Standing, *, since: float = 0.0) -> list[Turn]:
        return [turn for turn in self.turns if turn.standing is standing and turn.at >= since]

    def degrees(self) -> list[int]:
        return [len(host.peers) for host in self.up]

    # -- how it works ---------------------------------------------------------------------------

    def _tick(self, host: SimulatedHost) -> None:
        if not host.running or self.hosts.get(host.key) is not host:
            return
        if not host.asleep:
            self.perform(host, host.view.on_tick(self.now))
        self.at(self.now + self.tick_s * (0.95 + 0.1 * self.random.random()), lambda: self._tick(host))

    def perform(self, host: SimulatedHost, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(host, effect)
            elif isinstance(effect, Connect):
                self._dial(host, effect.node)
            elif isinstance(effect, Disconnect):
                self._disconnect(host, effect.node)
            elif isinstance(effect, Changed):
                self._note(host, effect.nodes)
            elif isinstance(effect, Duplicate):
                host.duplicates.append(effect.reason)

    def _note(self, host: SimulatedHost, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            member = host.view.member(node)
            standing = None if member is None else member.standing
            if self._standings.get((host.key, node)) is not standing:
                self._standings[host.key, node] = standing
                self.turns.append(Turn(self.now, host.key, node, standing))

    def _peer(self, host: SimulatedHost, node: NodeId) -> SimulatedHost | None:
        return next((self.hosts[key] for key in self._keys.get(node, ()) if key in host.peers), None)

    def _send(self, host: SimulatedHost, effect: Send) -> None:
        peer = self._peer(host, effect.to)
        if peer is None and any(len(keys) > 1 for keys in self._keys.values()):
            # Of two processes with one id the other one has just taken this one's place.
            return
        assert peer is not None, "sent to somebody without a connection"
        message = self.scales.weighed(host.key, peer.key, effect.message)
        if self.random.random() < self.loss or not self.network.reaches(host.key, peer.key):
            return
        self.after(self.network.delay_s(host.key, peer.key), lambda: self._deliver(host, peer, message))

    def _deliver(self, host: SimulatedHost, peer: SimulatedHost, message: Message) -> None:
        current = self.hosts.get(peer.key) is peer and peer.running and not peer.asleep
        if current and host.key in peer.peers and self.hosts[host.key] is host:
            self.perform(peer, peer.view.on_message(host.id, message, self.now))

    def _dial(self, host: SimulatedHost, node: NodeId) -> None:
        for key in self._keys.get(node, ()):
            peer = self.hosts[key]
            if peer is not host and self.random.random() >= self.loss:
                self.after(self.network.delay_s(host.key, key), partial(self._arrive, host, peer))

    def _arrive(self, host: SimulatedHost, peer: SimulatedHost) -> None:
        current = all(self.hosts.get(one.key) is one and one.running for one in (host, peer))
        if not current or host.asleep or peer.asleep or not self.network.reaches(host.key, peer.key):
            return
        for near, far in ((peer, host), (host, peer)):
            known = self._peer(near, far.id)
            if known is None:
                near.peers.add(far.key)
                self.perform(near, near.view.on_connected(far.id, self.now))
            elif known is not far:
                # Two processes with one id: the new connection takes the place of the old one.
                near.peers.discard(known.key)
                known.peers.discard(near.key)
                self.perform(known, known.view.on_disconnected(near.id, self.now))
                near.peers.add(far.key)

    def _disconnect(self, host: SimulatedHost, node: NodeId) -> None:
        peer = self._peer(host, node)
        if peer is not None:
            self._close_far_side(host, peer.key)
            self._close_side(host, peer.key)

    def _close_far_side(self, host: SimulatedHost, peer: object) -> None:
        far = self.hosts[peer]
        if self.network.reaches(host.key, peer):
            self.after(self.network.delay_s(host.key, far.key), lambda: self._close_when_awake(far, host))

    def _close_when_awake(self, near: SimulatedHost, far: SimulatedHost) -> None:
        if near.asleep:
            self.at(self.now + 0.01, lambda: self._close_when_awake(near, far))
        elif near.key not in far.peers or not far.running:
            self._close_side(near, far.key)

    def _close_side(self, near: SimulatedHost, far: object) -> None:
        if near.running and far in near.peers:
            near.peers.discard(far)
            self.perform(near, near.view.on_disconnected(self.hosts[far].id, self.now))
