"""The members of the mesh, the connections to them, and what this node tells them.

A thin driver: `membership.View` has the rules, `transport.Network` the
connections. Both report here, and here alone effects are performed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mesh_llm.defaults import MEMBER_KNOWN_LIMIT, REMEMBERED_LIMIT
from mesh_llm.errors import Expelled, Forged, MalformedMessage, MeshError, NodeUnreachable
from mesh_llm.membership.effects import Changed, Connect, Disconnect, Duplicate, Effect, Send
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import from_document, signed_to_document, to_document, told_to_document
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view import View
from mesh_llm.peers import claims_exchange
from mesh_llm.peers.claims_exchange import ClaimsExchange
from mesh_llm.peers.forwarding import Forwarding
from mesh_llm.peers.members import Members
from mesh_llm.peers.own_machine import OwnMachine
from mesh_llm.peers.paths import Paths
from mesh_llm.peers.trust import Origin, Service, Trust
from mesh_llm.transport.network import Network, Peer, Stream
from mesh_llm.types import (
    Address,
    NodeFacts,
    NodeId,
    Role,
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


FOR_CLIENTS = frozenset({"http", "serving", "forward"})
"""Kinds of streams that a member which only uses the API may open."""


class Mesh(Members):
    """Keeps up with the others, and with them what this node knows."""

    def __init__(
        self,
        me: NodeId,
        facts: NodeFacts,
        *,
        incarnation: int,
        on_change: Callable[[], None],
        on_refused: Callable[[NodeId, str], None],
    ) -> None:
        trust = Trust()
        view = View(
            me,
            incarnation=incarnation,
            facts=facts,
            now=_now(),
            seed=incarnation,
            seal=trust.seal,
            open=trust.verified,
        )
        super().__init__(me, facts, view, trust)
        self.failure: MeshError | None = None
        """Why this node can be a member no longer: it was expelled, or is not the only one of its id."""
        self.connections: Counter[str] = Counter()
        """Made since this node started: with members that were `new` to it, and `again` with others."""
        self.disconnections: Counter[str] = Counter()
        """By how they ended: the other one `left`, this node `closed` it, or it was `lost`."""
        self.own_machine = OwnMachine(self)
        self.paths = Paths(self, self.own_machine)
        self.met: dict[NodeId, bool] = {}
        """Whoever was connected since this node started, the last few thousand: whether it said goodbye."""
        self.on_refused = on_refused
        self._on_change = on_change
        self._network: Network | None = None
        self._claims: ClaimsExchange | None = None
        self._forwarding = Forwarding(
            self, lambda kind, role: self._services.get(kind) if kind in self.kinds_for(role) else None
        )
        self._services: dict[str, Service] = {
            "forward": self._forwarding.serve_middle,
            "forwarded": self._forwarding.serve_end,
        }
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._links_told = 0.0
        self._partners: set[NodeId] = set()

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
        self._highest_epoch = max(self._highest_epoch, epoch)
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

    def _keep_partners(self) -> None:
        """Those with whom a plan is shared are watched closest, in however large a mesh."""
        partners: set[NodeId] = set()
        for host, serving in self.all_serving():
            nodes = {host, *(stage.node for stage in serving.plan.stages)}
            partners |= nodes - {self.me} if self.me in nodes else set()
        if partners != self._partners:
            self._partners = partners
            self._perform(self._view.set_partners(partners))

    # -- streams -------------------------------------------------------------------------------

    async def open(self, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        """A stream to a member: direct, or through one that reaches it."""
        peer = self.peer(node)
        if peer is not None:
            return await peer.open(kind, header)
        failed: MeshError = NodeUnreachable(f"there is no path to {self.name_of(node)}")
        for between in self.paths.between(node):
            if (helper := self.peer(between)) is None:
                continue
            try:
                return await self._forwarding.open(helper, node, kind, header)
            except MeshError as error:
                log.info("no way through %s to node=%s: %s", between[:8], node[:8], error.message)
                failed = error
        raise failed

    # -- what the network reports (transport.network.Handler) -----------------------------------

    def kinds_for(self, role: Role) -> frozenset[str]:
        return FOR_CLIENTS if role is Role.CLIENT else frozenset(self._services)

    def on_peer(self, peer: Peer) -> None:
        log.info("peer up node=%s role=%s", peer.id[:8], peer.role)
        self.connections["again" if peer.id in self.met else "new"] += 1
        self.met[peer.id] = False
        if len(self.met) > MEMBER_KNOWN_LIMIT:
            del self.met[next(iter(self.met))]
        self._expelled.discard(peer.id)
        on_peer = self._view.on_visitor if peer.role is Role.CLIENT else self._view.on_connected
        self._perform(on_peer(peer.id, _now()))
        if self._claims is not None and self.facts.role is not Role.CLIENT:
            self._claims.greet(peer)

    def on_lost(self, peer: Peer, reason: str) -> None:
        log.info("peer lost node=%s: %s", peer.id[:8], reason)
        self.disconnections["left" if peer.left else "closed" if peer.ended_here else "lost"] += 1
        if peer.id in self.met:
            self.met[peer.id] = peer.left
        if peer.left:
            # Its last message may not have made it out; that it stopped is what counts.
            self._perform(self._view.on_left(peer.id, _now()))
        self._perform(self._view.on_disconnected(peer.id, _now()))

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None:
        if body.get("kind") == claims_exchange.KIND:
            self.claims.receive(peer, body)
            return
        if body.get("kind") == claims_exchange.PROMOTION:
            if self.claims.promoted(body):
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
    def claims(self) -> ClaimsExchange:
        assert self._claims is not None
        return self._claims

    def claim(self) -> None:
        """Tell everybody what this node has set or revoked."""
        self.claims.spread()
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
