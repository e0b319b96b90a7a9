"""Networks on loopback whose handlers write down what they are told, and endpoints that keep to no rules."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mesh_llm.defaults import ALPN
from mesh_llm.errors import PeerLost
from mesh_llm.transport.admissions import IssuedInvite
from mesh_llm.transport.credential import check_may_invite
from mesh_llm.transport.endpoint import remote_address
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, decode, encode
from mesh_llm.transport.iroh_library import iroh, use_running_loop
from mesh_llm.transport.network import Membership, Network, NetworkConfig, Peer, Stream
from mesh_llm.types import Address, NodeId, Role

WITHIN_S = 30.0
"""For anything that happens at once; a busy machine may take its time."""

NODE_KINDS = ("echo", "sink", "fail", "hang", "document")
CLIENT_KINDS = ("echo",)


class Recorder:
    """A handler: `events` is everything in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, NodeId, Any]] = []
        self.changed = asyncio.Event()
        self.cancelled_streams = 0
        self.sink_may_read = asyncio.Event()
        self.sunk = 0

    def note(self, what: str, node: NodeId | None = None, detail: Any = None) -> None:
        self.events.append((what, node or NodeId(""), detail))
        self.changed.set()

    def on_peer(self, peer: Peer) -> None:
        self.note("peer", peer.id, peer.role)

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.note("lost", peer.id, reason)

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None:
        self.note("message", peer.id, body)

    def on_duplicate(self) -> None:
        self.note("duplicate")

    def on_refused(self, node: NodeId, reason: str) -> None:
        self.note("refused", node, reason)

    def on_address(self) -> None:
        self.note("address")

    def kinds_for(self, role: Role) -> Collection[str]:
        return CLIENT_KINDS if role is Role.CLIENT else NODE_KINDS

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        return {"welcome": node, "as": role.value}

    async def on_stream(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        self.note("stream", peer.id, (kind, header))
        if kind == "echo":
            while data := await stream.read(1 << 16):
                await stream.write(data)
        elif kind == "document":
            await stream.write_document({"got": await stream.read_document(1000)})
        elif kind == "sink":
            await self.sink_may_read.wait()
            while data := await stream.read(1 << 16):
                self.sunk += len(data)
            await stream.write(str(self.sunk).encode())
        elif kind == "fail":
            raise RuntimeError("a mistake in a handler")
        else:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled_streams += 1
                raise

    def of(self, what: str) -> list[tuple[NodeId, Any]]:
        return [(node, detail) for kind, node, detail in self.events if kind == what]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {WITHIN_S:g} s: {what}; events: {self.events}") from None

    async def wait(self, what: str, count: int = 1) -> list[tuple[NodeId, Any]]:
        await self.until(lambda: len(self.of(what)) >= count, f"{count} × {what}")
        return self.of(what)


class Member:
    def __init__(self, network: Network, handler: Recorder) -> None:
        self.network = network
        self.handler = handler
        self.id = network.id
        self.identity = network.config.identity

    def invite(
        self, *, role: Role = Role.NODE, lifetime_s: float | None = 3600.0, limit: int | None = None
    ) -> tuple[IssuedInvite, str]:
        """One of its own, and its token."""
        network = self.network
        check_may_invite(network.mesh.role(self.id), role)
        assert network.mesh.mesh is not None
        issued = network.mesh.admissions.issue(role=role, now=time.time(), lifetime_s=lifetime_s, limit=limit)
        content = Invite(
            id=issued.id,
            mesh=network.mesh.mesh,
            secret=issued.secret,
            inviter=self.id,
            address=network.address,
            own_relay=network.config.relay is not None,
            relay_token=network.config.relay_token,
            role=role,
            expires=issued.expires,
        )
        return issued, encode(content, self.identity)

    def token(self, **options: Any) -> Invite:
        return decode(self.invite(**options)[1])

    def revoke(self, invite: str, issuer: NodeId | None = None) -> None:
        self.network.mesh.revoke(invite, self.identity, issuer)
        self.network.expel()

    def peer(self, other: Member) -> Peer:
        return self.network.peers[other.id]

    async def connect(self, other: Member, **options: Any) -> Peer:
        return await self.network.connect(other.id, other.network.address, **options)

    def written(self) -> Membership:
        """The membership as it comes back from a file."""
        document = json.loads(json.dumps(self.network.mesh.to_document()))
        return Membership.from_document(document, now=time.time())


class Mesh:
    """Starts members, and at the end looks for what they left behind."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._strangers: list[Any] = []
        stack.push_async_callback(self._close_strangers)

    async def _close_strangers(self) -> None:
        """Some have nobody left to say goodbye to: they do not get long."""
        closing = [asyncio.ensure_future(endpoint.close()) for endpoint in self._strangers]
        if closing:
            _, late = await asyncio.wait(closing, timeout=0.5)
            for task in late:
                task.cancel()
            await asyncio.wait(closing)

    async def member(self, mesh: Membership | None = None, identity: Identity | None = None) -> Member:
        """One that belongs nowhere yet, unless `mesh` says where."""
        identity = identity or new_identity()
        handler = Recorder()
        config = NetworkConfig(identity=identity, bind_ip="127.0.0.1", no_relay=True)
        network = Network(config, Membership() if mesh is None else mesh, handler)
        await network.start()
        self._stack.push_async_callback(network.close)
        return Member(network, handler)

    async def creator(self, identity: Identity | None = None) -> Member:
        identity = identity or new_identity()
        return await self.member(Membership.create(identity), identity)

    async def pair(self, role: Role = Role.NODE) -> tuple[Member, Member]:
        """A creator, and one who has joined it."""
        first, second = await self.creator(), await self.member()
        await second.network.join(first.token(role=role))
        await first.handler.wait("peer")
        return first, second

    async def stranger(self, alpn: bytes = ALPN) -> Stranger:
        use_running_loop()
        ffi = iroh()
        endpoint = await ffi.Endpoint.bind(
            ffi.EndpointOptions(
                preset=ffi.preset_minimal(),
                relay_mode=ffi.RelayMode.disabled(),
                bind_addr="127.0.0.1:0",
                alpns=[alpn],
            )
        )
        self._strangers.append(endpoint)
        return Stranger(endpoint)


class Stranger:
    """An endpoint that says what it likes."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.id = NodeId(endpoint.id().to_bytes().hex())
        self.address = Address(direct=tuple(endpoint.addr().direct_addresses()))

    async def dial(self, member: Member) -> Any:
        return await self.endpoint.connect(remote_address(member.id, member.network.address), ALPN)


@asynccontextmanager
async def mesh_of_members() -> AsyncIterator[Mesh]:
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        yield Mesh(stack)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks that nobody ended: {left}"


def new_identity() -> Identity:
    return Identity.from_secret(secrets.token_bytes(32))


def ordered_identities() -> tuple[Identity, Identity]:
    """Two, the one with the smaller id first."""
    first, second = sorted((new_identity(), new_identity()), key=lambda identity: identity.id)
    return first, second


async def read_all(stream: Stream) -> bytes:
    parts = []
    while part := await stream.read(1 << 16):
        parts.append(part)
    return b"".join(parts)


async def broken(stream: Stream) -> str:
    """What a read of a stream that broke says."""
    try:
        async with asyncio.timeout(WITHIN_S):
            data = await stream.read(100)
    except PeerLost as error:
        return error.message
    raise AssertionError(f"the stream gave {data!r}")
