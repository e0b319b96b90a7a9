"""The members of the mesh, the connections to them, and what this node tells them.

A thin driver: `membership.View` has the rules, `transport.Network` the
connections. Both report here, and here alone effects are performed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mesh_llm.defaults import MEMBER_KNOWN_LIMIT, REMEMBERED_LIMIT
from mesh_llm.errors import Expelled, Forged, MalformedMessage, MeshError, NodeUnreachable
from mesh_llm.membership.checked_fields import counts_up_to
from mesh_llm.membership.effects import Changed, Connect, Disconnect, Duplicate, Effect, Send
from mesh_llm.membership.member import Member, Standing, serving_among
from mesh_llm.membership.messages import from_document, signed_to_document, to_document, told_to_document
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view import View
from mesh_llm.peers import claims_exchange
from mesh_llm.peers.claims_exchange import ClaimsExchange
from mesh_llm.peers.forwarding import Forwarding
from mesh_llm.peers.paths import Paths
from mesh_llm.peers.trust import Origin, Trust
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.network import Membership, Network, Peer, Stream
from mesh_llm.types import (
    Address,
    MeshSettings,
    NodeFacts,
    NodeId,
    Role,
    ServingPlan,
    State,
)

MESH_TICK_S = 0.25
"""Between two looks at the clock by the rules of membership, whose shortest period is a second."""
MESH_CONNECT_S = 10.0
"""For a connection to a member: a handshake over a relay on another continent takes one or two."""
MESH_LINKS_PUBLISH_S = 5.0
"""Between two reports of measured delays: each is gossip to everybody, and a look at the plan."""
WELCOME_BYTES = 128 << 10
"""Of the records that one who joins is told: others follow by gossip."""


log = logging.getLogger(__name__)


Service = Callable[[Origin, dict[str, Any], Stream], Awaitable[None]]
"""Serves one stream that another member opened; its task ends with the stream."""

FOR_CLIENTS = frozenset({"http", "serving", "forward"})
"""Kinds of streams that a member which only uses the API may open."""
_UNREADY = {
    State.STARTING: "is starting",
    State.DRAINING: "is leaving",
    State.FAILED: "its engine does not run",
}


class Mesh:
    """What this node knows of the others."""

    def __init__(
        self,
        me: NodeId,
        facts: NodeFacts,
        *,
        incarnation: int,
        on_change: Callable[[], None],
        on_refused: Callable[[NodeId, str], None],
    ) -> None:
        self.me = me
        self.facts = facts
        self.failure: MeshError | None = None
        """Why this node can be a member no longer: it was expelled, or is not the only one of its id."""
        self._expelled: set[NodeId] = set()
        self.connections: Counter[str] = Counter()
        """Made since this node started: with members that were `new` to it, and `again` with others."""
        self.disconnections: Counter[str] = Counter()
        """By how they ended: the other one `left`, this node `closed` it, or it was `lost`."""
        self.paths = Paths(self)
        self.on_refused = on_refused
        self._on_change = on_change
        self._trust = Trust()
        self._view = View(
            me,
            incarnation=incarnation,
            facts=facts,
            now=_now(),
            seed=incarnation,
            seal=self._trust.seal,
            open=self._trust.verified,
        )
        self._network: Network | None = None
        self._claims: ClaimsExchange | None = None
        self._forwarding = Forwarding(self)
        self._services: dict[str, Service] = {
            "forward": self._forwarding.serve_middle,
            "forwarded": self._forwarding.serve_end,
        }
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._met: dict[NodeId, None] = {}
        """Whoever was connected since this node started, the last few thousand."""
        self._links_told = 0.0
        self._partners: set[NodeId] = set()
        self._highest_epoch = 0

    def attach(self, network: Network, services: Mapping[str, Service]) -> None:
        self._network = self._trust.network = network
        self._claims = ClaimsExchange(network, self._on_claims)
        self._services.update(services)

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps time for the rules, until cancelled."""
        try:
            while True:
                await asyncio.sleep(MESH_TICK_S)
                self._perform(self._view.on_tick(_now()))
                self.paths.read_meters(_now())
                self._tell_links()
                self._keep_partners()
        finally:
            for task in self._dialling.values():
                task.cancel()
            await asyncio.gather(*self._dialling.values(), return_exceptions=True)

    def leave(self) -> None:
        """Say goodbye: nobody waits for us."""
        self._perform(self._view.leave(_now()))

    def publish(self, **changes: Any) -> None:
        """Change what this node tells about itself."""
        if (facts := replace(self.facts, **changes)) != self.facts:
            self.facts = facts
            self._perform(self._view.publish(facts, _now()))

    def know(self, addresses: Mapping[NodeId, Address], *, epoch: int = 0) -> None:
        """Where members may be, by a token or an older home: worth a try, no more. And the last epoch."""
        self._highest_epoch = max(self._highest_epoch, min(epoch, counts_up_to(time.time())))
        records = [
            Record(
                node=node,
                incarnation=0,
                sequence=0,
                standing=Standing.ALIVE,
                facts=NodeFacts(name="", role=Role.NODE, version="", address=address),
            )
            for node, address in addresses.items()
        ]
        self._perform(self._view.know(records, _now()))

    def recall(self, told: Iterable[Told]) -> set[NodeId]:
        """Members that somebody, or the home, remembers by what they have signed themselves; who they are."""
        found = []
        for each in told:
            try:
                record = self._trust.verified(each) if each.signed is not None else None
            except Forged as error:
                log.warning("not remembered node=%s: %s", each.node[:8], error.message)
                continue
            found += [record] if record is not None else []
        self._perform(self._view.know(found, _now()))
        return {record.node for record in found}

    @property
    def records(self) -> tuple[Record, ...]:
        """Of members that are not gone, as they have signed them."""
        return self._view.records

    # -- what others ask -----------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        return self._view.members

    def alive(self) -> list[Member]:
        return [member for member in self._view.members if member.present]

    def others_reason(self) -> str:
        """Why nothing serves, by the word of another node: one that knows the model, perhaps."""
        busy = (State.LOADING, State.WAITING)
        reasons = (m.facts.reason for m in self.alive() if m.facts.state in busy and m.id != self.me)
        return next((reason for reason in reasons if reason), "")

    def member(self, node: NodeId) -> Member | None:
        return self._view.member(node)

    def name_of(self, node: NodeId) -> str:
        member = self._view.member(node)
        return member.facts.name if member is not None and member.facts.name else node[:8]

    def has_company(self) -> bool:
        return len(self.alive()) > 1

    def shares_machine(self, node: NodeId) -> bool:
        member = self._view.member(node)
        return member is not None and bool(self.facts.machine) and member.facts.machine == self.facts.machine

    def nodes_here(self) -> int:
        """Nodes that compute on this machine, this one included."""
        nodes = (m for m in self.alive() if m.facts.role is not Role.CLIENT)
        return max(1, sum(self.shares_machine(member.id) for member in nodes))

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=tuple(
                Candidate(
                    id=member.id,
                    facts=member.facts,
                    alive=member.present,
                    reachable=member.id == self.me or self._is_heard(member),
                )
                for member in self._view.members
                if member.standing is not Standing.LEFT
            )
        )

    def _is_heard(self, member: Member) -> bool:
        """Whether a new plan may count on it; one that runs goes on until its members are dead."""
        return member.standing is Standing.ALIVE and (member.connected or bool(member.via))

    def unready(self) -> dict[NodeId, str]:
        """Members that take no part yet, or no longer."""
        found = {m.id: _UNREADY[m.facts.state] for m in self.alive() if m.facts.state in _UNREADY}
        if self.facts.state is State.FAILED:
            # It knows best itself when to try again.
            found.pop(self.me, None)
        return found | {m.id: "its user unloaded the model there" for m in self.alive() if m.facts.resting}

    def own_memory_bytes(self) -> int:
        """All that a plan of its own may take."""
        return usable_bytes(self.facts)

    def serving(self) -> tuple[NodeId, ServingPlan] | None:
        """The published plan of the highest epoch, and its host."""
        return serving_among(self.alive())

    def highest_epoch(self) -> int:
        """Of all plans that were ever published, as far as this node has heard."""
        epochs = [m.facts.serving.epoch for m in self.members if m.facts.serving]
        self._highest_epoch = max([self._highest_epoch, *epochs])
        return self._highest_epoch

    def started(self, node: NodeId) -> int | None:
        """Another number after each restart: incarnations begin with the time in ms, and count doubts."""
        member = self._view.member(node)
        return member.incarnation // 1000 if member is not None else None

    def settings(self) -> MeshSettings | None:
        """Those in force: an owner has signed them."""
        return self.membership.settings if self._network is not None else None

    @property
    def membership(self) -> Membership:
        return self._trust.membership

    @property
    def identity(self) -> Identity:
        return self._trust.identity

    def service(self, kind: str, role: Role) -> Service | None:
        """What serves a stream of that kind, if one of that role may open it."""
        return self._services.get(kind) if kind in self.kinds_for(role) else None

    def _keep_partners(self) -> None:
        """Those with whom a plan is shared are watched closest, in however large a mesh."""
        published = self.serving()
        nodes = {stage.node for stage in published[1].plan.stages} | {published[0]} if published else set()
        partners = nodes - {self.me} if self.me in nodes else set()
        if partners != self._partners:
            self._partners = partners
            self._perform(self._view.set_partners(partners))

    # -- streams -------------------------------------------------------------------------------

    async def open(self, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        """A stream to a member: direct, or through one that reaches it."""
        peer = self.peer(node)
        if peer is not None:
            return await peer.open(kind, header)
        for between in self.paths.between(node):
            if (helper := self.peer(between)) is not None:
                return await self._forwarding.open(helper, node, kind, header)
        raise NodeUnreachable(f"there is no way to {self.name_of(node)}")

    def peer(self, node: NodeId) -> Peer | None:
        """The connection to it, if there is one."""
        return self._network.peers.get(node) if self._network is not None else None

    # -- what the network reports (transport.network.Handler) -----------------------------------

    def kinds_for(self, role: Role) -> frozenset[str]:
        return FOR_CLIENTS if role is Role.CLIENT else frozenset(self._services)

    def on_peer(self, peer: Peer) -> None:
        log.info("peer up node=%s role=%s", peer.id[:8], peer.role)
        self.connections["again" if peer.id in self._met else "new"] += 1
        self._met[peer.id] = None
        if len(self._met) > MEMBER_KNOWN_LIMIT:
            del self._met[next(iter(self._met))]
        self._expelled.discard(peer.id)
        on_peer = self._view.on_visitor if peer.role is Role.CLIENT else self._view.on_connected
        self._perform(on_peer(peer.id, _now()))
        if self._claims is not None and self.facts.role is not Role.CLIENT:
            self._claims.greet(peer)

    def on_lost(self, peer: Peer, reason: str) -> None:
        log.info("peer lost node=%s: %s", peer.id[:8], reason)
        self.disconnections["left" if peer.left else "closed" if peer.ended_here else "lost"] += 1
        if peer.left:
            # Its last message may not have made it out; that it stopped is what counts.
            self._perform(self._view.on_left(peer.id, _now()))
        self._perform(self._view.on_disconnected(peer.id, _now()))

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None:
        if body.get("kind") == claims_exchange.KIND:
            assert self._claims is not None
            self._claims.receive(peer, body)
            return
        if body.get("kind") == claims_exchange.PROMOTION:
            assert self._claims is not None
            if self._claims.promoted(body):
                self.publish(role=Role.OWNER)
                self._on_change()
            return
        try:
            message = from_document(body)
        except MalformedMessage as error:
            # A newer version's, perhaps: what is not understood is left out, and does no harm.
            peer.unknown_frames += 1
            log.info("message left out node=%s: %s", peer.id[:8], error.message)
            return
        self._perform(self._view.on_message(peer.id, message, _now()))

    async def on_stream(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        service = self._services.get(kind)
        if service is None:
            stream.reset()
            return
        try:
            await service(Origin.of(peer.id, peer.role, peer.credential), header, stream)
        except MeshError as error:
            log.info("stream ended kind=%s node=%s: %s", kind, peer.id[:8], error.message)
            stream.reset()

    def on_address(self) -> None:
        assert self._network is not None
        self.publish(address=self._network.address)

    def on_duplicate(self) -> None:
        self._fail(_duplicate())

    def _fail(self, error: MeshError) -> None:
        if self.failure is None:
            self.failure = error
            self._on_change()

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        settings = self.membership.in_force
        # A use of the invite is written down before it is given.
        self._on_change()
        return {
            "name": self.facts.name,
            "settings": signed_to_document(settings.signed) if settings is not None else None,
            "members": [
                told_to_document(told) for told in self._view.told(REMEMBERED_LIMIT, size_bytes=WELCOME_BYTES)
            ],
        }

    # -- who may say what ----------------------------------------------------------------------

    @property
    def claims_heard(self) -> asyncio.Event:
        """A member has told what was claimed while this node was away."""
        assert self._claims is not None
        return self._claims.heard

    def claim(self) -> None:
        """Tell everybody what this node has set or revoked."""
        assert self._claims is not None
        self._claims.spread()
        self._on_claims()

    def _on_claims(self) -> None:
        """Settings or revocations have changed: those who are out go, this node itself included."""
        assert self._network is not None
        strikes = self.membership.revocations.strikes
        out = {node for node, credential in self._credentials() if strikes(credential) is not None}
        self._expelled |= out
        self._network.expel()
        for node in out:
            self._perform(self._view.forget(node, _now()))
        try:
            self.membership.role(self.me)
        except MeshError as error:
            self._fail(error)
        self._on_change()

    @property
    def expelled(self) -> set[NodeId]:
        """Since this node started, and not let in again."""
        return self._expelled - {record.node for record in self._view.all_records}

    def _credentials(self) -> Iterator[tuple[NodeId, Credential]]:
        """By which others are or were members, or clients that are connected here, as they have shown."""
        assert self._network is not None
        for peer in self._network.peers.values():
            yield peer.id, peer.credential
        for record in self._view.all_records:
            if record.node != self.me and record.signed is not None:
                yield record.node, credentials.from_text(record.signed.credential)

    def credentials_of(self, *nodes: NodeId) -> list[Credential]:
        """All that these have shown, or everybody has: one who was promoted has two."""
        return [credential for node, credential in self._credentials() if not nodes or node in nodes]

    def promote(self, node: NodeId, credential: Credential) -> None:
        """Hand a member the credential that makes it an owner."""
        peer = self.peer(node)
        if peer is None:
            raise NodeUnreachable(f"{self.name_of(node)} is not connected", hint="try again when it is")
        peer.send(claims_exchange.promotion(credential))

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        changed = False
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    if (peer := self.peer(to)) is not None:
                        peer.send(to_document(message))
                case Connect(node=node, address=address):
                    self._dial(node, address)
                case Disconnect(node=node, reason=reason):
                    if (peer := self.peer(node)) is not None:
                        peer.close(reason)
                case Changed():
                    changed = True
                case Duplicate():
                    self.failure = self.failure or _duplicate()
                    changed = True
        if changed:
            self.highest_epoch()
            self._on_change()

    def _dial(self, node: NodeId, address: Address) -> None:
        if node in self._dialling or self._network is None or self.peer(node) is not None:
            return
        task = asyncio.create_task(self._dialled(self._network, node, address), name=f"dial {node[:8]}")
        self._dialling[node] = task
        task.add_done_callback(lambda _: self._dialling.pop(node, None))

    async def _dialled(self, network: Network, node: NodeId, address: Address) -> None:
        try:
            async with asyncio.timeout(MESH_CONNECT_S):
                await network.connect(node, address)
        except Expelled as error:
            # Verified: the revocation itself was shown.
            self._fail(error)
        except (MeshError, TimeoutError) as error:
            # Asked for again by the rules, later and later.
            log.debug("no connection node=%s: %r", node[:8], error)

    def _tell_links(self) -> None:
        """Publish what was measured, but not its noise: every change is gossip, and a look at the plan."""
        if _now() - self._links_told < MESH_LINKS_PUBLISH_S:
            return
        if (links := self.paths.news()) is not None:
            self._links_told = _now()
            self.publish(links=links)


def _duplicate() -> MeshError:
    return MeshError(
        "another node runs with a copy of this node's home",
        hint="give each node a home of its own: rm -r the copy, and join again",
    )


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _now() -> float:
    """Counts on while a laptop sleeps, where the system has such a clock: the rules have to notice."""
    return time.clock_gettime(_CLOCK)
