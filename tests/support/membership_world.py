"""A world of simulated nodes around `View`: connections, delay, loss, partitions, sleep and death.

Events happen in the order of their time, and chance comes from a seed: a run repeats exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random

from mesh_llm.membership.effects import Changed, Connect, Disconnect, Duplicate, Effect, Send
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import Message, Update, from_document, to_document
from mesh_llm.membership.outbox import updates
from mesh_llm.membership.record import Record, Told, read_record
from mesh_llm.membership.ring import chosen
from mesh_llm.membership.view import View
from mesh_llm.transport.claims import Claim, sign, signer_of
from mesh_llm.transport.credential import check, extend, from_text
from mesh_llm.transport.identity import Identity
from mesh_llm.types import Address, MeshId, NodeFacts, NodeId, Role, Signed


def node_id(name: object) -> NodeId:
    return NodeId(blake2b(str(name).encode(), digest_size=32).hexdigest())


def seal(text: str) -> Signed:
    """In place of a signature, where nobody cheats."""
    return Signed(text=text, signature="signed", credential="")


@lru_cache(maxsize=1 << 16)
def opened(told: Told) -> Record | None:
    """Read once for a thousand nodes."""
    return read_record(told)


class Trust:
    """How a world's nodes sign and verify: not at all."""

    def id_of(self, name: object) -> NodeId:
        return node_id(name)

    def seal(self, name: object) -> Callable[[str], Signed]:
        return seal

    def open(self) -> Callable[[Told], Record | None]:
        """For one node."""
        return opened


class RealTrust(Trust):
    """As real nodes do: each with a key and an invite of the creator's, every record read and verified."""

    def __init__(self) -> None:
        self._creator = _identity("creator")
        self.mesh = MeshId(self._creator.id)

    def id_of(self, name: object) -> NodeId:
        return _identity(name).id

    def seal(self, name: object) -> Callable[[str], Signed]:
        identity = _identity(name)
        invite = identity.id[:16]
        credential = extend((), self.mesh, self._creator, identity.id, Role.NODE, invite)
        return lambda text: sign(identity, self.mesh, credential, Claim.RECORD, text)

    def open(self) -> Callable[[Told], Record | None]:
        checked: set[str] = set()

        def verified(told: Told) -> Record | None:
            assert told.signed is not None
            if told.signed.credential not in checked:
                # Checked once by every node; those of this process would find it checked by another one.
                checked.add(told.signed.credential)
                check(from_text(told.signed.credential), self.mesh, told.node)
            assert signer_of(told.signed, self.mesh, Claim.RECORD).node == told.node
            return read_record(told)

        return verified


@cache
def _identity(name: object) -> Identity:
    return Identity.from_secret(blake2b(f"key of {name}".encode(), digest_size=32).digest())


def facts(name: object, **others: object) -> NodeFacts:
    known: dict[str, object] = {"name": str(name), "role": Role.NODE, "version": "1.0"}
    known["address"] = Address(direct=("192.0.2.1:7777",))
    return NodeFacts(**{**known, **others})  # type: ignore[arg-type]


@dataclass
class Host:
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
class SlotRequest:
    """A member's standing changed in somebody's view."""

    at: float
    viewer: object
    subject: NodeId
    standing: Standing | None


class World:
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
    ) -> None:
        self.random = Random(seed)
        self.trust = RealTrust() if verify else Trust()
        self.delay_s, self.jitter_s, self.loss, self.tick_s = delay_s, jitter_s, loss, tick_s
        self.weigh_every = weigh_every
        self.now = 1000.0
        self.hosts: dict[object, Host] = {}
        self.turns: list[SlotRequest] = []
        self.largest_bytes = 0
        self.bytes_to: Counter[tuple[object, object]] = Counter()
        """Message bytes by (from, to); with `weigh_every` above 1, a sample scaled up."""
        self.messages = 0
        self._standings: dict[tuple[object, NodeId], Standing | None] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._blocked: set[frozenset[object]] = set()
        self._sides: dict[object, object] = {}
        self._lives = 0
        self._keys: dict[NodeId, dict[object, None]] = {}
        """Processes by id, in the order of their start."""

    # -- making and breaking --------------------------------------------------------------------

    def start(
        self, key: object, *, id: NodeId | None = None, know: Iterable[Record] = (), incarnation: int = 0
    ) -> Host:
        """A process starts; again, if it was there before."""
        self._lives += 1
        me = id or self.trust.id_of(key)
        grown = incarnation or int(self.now * 1000) + self._lives
        view = View(
            me,
            incarnation=grown,
            facts=facts(key),
            now=self.now,
            seed=self.random.getrandbits(64),
            seal=self.trust.seal(key),
            open=self.trust.open(),
        )
        host = self.hosts[key] = Host(key=key, id=me, view=view, born=self.now)
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

    def block(self, one: object, other: object) -> None:
        """Two that cannot reach each other: NATs, or a firewall."""
        self._blocked.add(frozenset((one, other)))

    def unblock(self, one: object, other: object) -> None:
        self._blocked.discard(frozenset((one, other)))

    def part(self, *sides: Iterable[object]) -> None:
        self._sides = {key: at for at, side in enumerate(sides) for key in side}

    def heal(self) -> None:
        self._sides = {}

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

    # -- time -----------------------------------------------------------------------------------

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, what = heappop(events)
            what()
        self.now = end

    def run_until(self, met: Callable[[], bool], *, within_s: float, step_s: float = 0.25) -> float:
        """Seconds that it took."""
        begun = self.now
        while not met():
            assert self.now - begun < within_s, f"not within {within_s} s"
            self.run(step_s)
        return self.now - begun

    # -- what there is to see -------------------------------------------------------------------

    @property
    def up(self) -> list[Host]:
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

    def turns_to(self, standing: Standing, *, since: float = 0.0) -> list[SlotRequest]:
        return [turn for turn in self.turns if turn.standing is standing and turn.at >= since]

    def degrees(self) -> list[int]:
        return [len(host.peers) for host in self.up]

    # -- how it works ---------------------------------------------------------------------------

    def _tick(self, host: Host) -> None:
        if not host.running or self.hosts.get(host.key) is not host:
            return
        if not host.asleep:
            self.perform(host, host.view.on_tick(self.now))
        self.at(self.now + self.tick_s * (0.95 + 0.1 * self.random.random()), lambda: self._tick(host))

    def perform(self, host: Host, effects: list[Effect]) -> None:
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

    def _note(self, host: Host, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            member = host.view.member(node)
            standing = None if member is None else member.standing
            if self._standings.get((host.key, node)) is not standing:
                self._standings[host.key, node] = standing
                self.turns.append(SlotRequest(self.now, host.key, node, standing))

    def reaches(self, one: object, other: object) -> bool:
        apart = self._sides.get(one, None) != self._sides.get(other, None)
        return not apart and frozenset((one, other)) not in self._blocked

    def _peer(self, host: Host, node: NodeId) -> Host | None:
        return next((self.hosts[key] for key in host.peers if self.hosts[key].id == node), None)

    def _later(self) -> float:
        return self.now + self.delay_s + self.jitter_s * self.random.random()

    def _send(self, host: Host, effect: Send) -> None:
        peer = self._peer(host, effect.to)
        if peer is None and any(len(keys) > 1 for keys in self._keys.values()):
            # Of two processes with one id the other one has just taken this one's place.
            return
        assert peer is not None, "sent to somebody without a connection"
        message = self._weighed(host, peer, effect.message)
        if self.random.random() < self.loss or not self.reaches(host.key, peer.key):
            return
        self.at(self._later(), lambda: self._deliver(host, peer, message))

    def _weighed(self, host: Host, peer: Host, message: Message) -> Message:
        """Through JSON and back, as on the wire, and counted."""
        self.messages += 1
        if self.messages % self.weigh_every:
            return message
        text = json.dumps(to_document(message), separators=(",", ":"))
        self.largest_bytes = max(self.largest_bytes, len(text))
        self.bytes_to[host.key, peer.key] += len(text) * self.weigh_every
        back = from_document(json.loads(text))
        assert back == message or isinstance(message, Update)
        return back

    def _deliver(self, host: Host, peer: Host, message: Message) -> None:
        current = self.hosts.get(peer.key) is peer and peer.running and not peer.asleep
        if current and host.key in peer.peers and self.hosts[host.key] is host:
            self.perform(peer, peer.view.on_message(host.id, message, self.now))

    def _dial(self, host: Host, node: NodeId) -> None:
        for key in self._keys.get(node, ()):
            peer = self.hosts[key]
            if peer is not host and self.random.random() >= self.loss:
                self.at(self._later(), lambda peer=peer: self._arrive(host, peer))  # type: ignore[misc]

    def _arrive(self, host: Host, peer: Host) -> None:
        current = all(self.hosts.get(one.key) is one and one.running for one in (host, peer))
        if not current or host.asleep or peer.asleep or not self.reaches(host.key, peer.key):
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

    def _disconnect(self, host: Host, node: NodeId) -> None:
        peer = self._peer(host, node)
        if peer is not None:
            self._close_far_side(host, peer.key)
            self._close_side(host, peer.key)

    def _close_far_side(self, host: Host, peer: object) -> None:
        far = self.hosts[peer]
        if self.reaches(host.key, peer):
            self.at(self._later(), lambda: self._close_when_awake(far, host))

    def _close_when_awake(self, near: Host, far: Host) -> None:
        if near.asleep:
            self.at(self.now + 0.01, lambda: self._close_when_awake(near, far))
        elif near.key not in far.peers or not far.running:
            self._close_side(near, far.key)

    def _close_side(self, near: Host, far: object) -> None:
        if near.running and far in near.peers:
            near.peers.discard(far)
            self.perform(near, near.view.on_disconnected(self.hosts[far].id, self.now))
