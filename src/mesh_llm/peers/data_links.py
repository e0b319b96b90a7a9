"""Ways to other nodes: data links for children, HTTP to the host's engine.

A data link is a socket that a child reads and writes. On the other side it is
the child itself where both share a machine (`local`) or a private network and
said so (`tcp`); else the node copies between the socket and a QUIC stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mesh_llm.defaults import LINK_TICKET_BYTES
from mesh_llm.errors import LinkFailed, LinkRefused, MeshError, PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.gateway.guest import Guest
from mesh_llm.gateway.upstream import SlotRequest
from mesh_llm.home import link_door
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import refusal
from mesh_llm.transport.direct_links import LinkListener, facing, knock_local, knock_tcp, new_ticket
from mesh_llm.transport.network import Stream
from mesh_llm.transport.splice import Splicer, SpliceReport, splice
from mesh_llm.transport.stream import StreamCode
from mesh_llm.types import LinkKind, NodeId

LINK_OPEN_S = 10.0
"""For a link to be opened and taken: a few round trips, and a worker that is busy for a moment."""


log = logging.getLogger(__name__)

Purpose = dict[str, Any]
Receive = Callable[[NodeId, Purpose, socket.socket], Awaitable[None]]
"""Takes a link that another node has opened; refuses it by raising a `MeshError`."""
Answer = Callable[[socket.socket, Guest], Awaitable[None]]
"""Answers HTTP requests of another node that come on a socket."""


@frozen
class Link:
    socket: socket.socket
    kind: LinkKind
    """When it was made."""
    moves: bool = False
    """It goes wherever the connection to its node goes: over a relay now, direct a moment later."""


class DataLinks:
    """Opens links to other nodes, and takes theirs."""

    def __init__(self, mesh: Mesh, *, receive: Receive, answer: Answer, bind_ip: str | None) -> None:
        self._mesh = mesh
        self._receive = receive
        self._answer = answer
        self._bind_ip = bind_ip
        """Where plain links arrive; None: at the address that faces the other node."""
        self.door: LinkListener | None = None
        """None while it is closed, and for one that has no worker."""
        self.splicer: Splicer | None = None
        """A native one, where there is one."""
        self.through: Callable[[NodeId, socket.socket], socket.socket] = lambda _, link: link
        """Every data link that is opened goes through it: where a laboratory makes links longer."""
        self._salt = secrets.token_bytes(16)
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- to others -----------------------------------------------------------------------------

    async def link(self, node: NodeId, purpose: Purpose) -> Link:
        """A data link to `node`'s worker, by the best way that there is."""
        ways: list[tuple[LinkKind, Callable[[NodeId, Purpose], Awaitable[socket.socket]]]] = []
        match self._mesh.paths.of_links(node):
            case LinkKind.LOCAL:
                ways.append((LinkKind.LOCAL, self._link_local))
            case LinkKind.TCP:
                ways.append((LinkKind.TCP, self._link_tcp))
        for kind, way in ways:
            try:
                async with asyncio.timeout(LINK_OPEN_S):
                    return Link(socket=self.through(node, await way(node, purpose)), kind=kind)
            except (LinkFailed, PeerLost, OSError, TimeoutError) as error:
                log.info("no %s link node=%s error=%r", kind, node[:8], error)
        async with _bounded(f"{self._mesh.name_of(node)} did not open a link"):
            link = await self._link_quic(node, purpose)
        return Link(
            socket=link,
            kind=self._mesh.paths.of_streams(node),
            moves=not self._mesh.paths.between(node),
        )

    def why_not(self, node: NodeId, kind: LinkKind) -> str | None:
        """Why there is no link of that kind to `node`; None where there is."""
        best, streams = self._mesh.paths.of_links(node), self._mesh.paths.of_streams(node)
        match kind:
            case LinkKind.LOCAL:
                return None if best is LinkKind.LOCAL else "the nodes are on two machines"
            case LinkKind.TCP:
                plain = "both nodes need --plain-lan, and a direct path between two machines"
                return None if best is LinkKind.TCP else plain
            case LinkKind.QUIC:
                return None if streams is LinkKind.QUIC else "the nodes have no direct path"
            case _:
                return None if streams is LinkKind.RELAY else "the nodes have a direct path"

    async def link_of(self, node: NodeId, purpose: Purpose, kind: LinkKind) -> socket.socket:
        """A data link of one kind, whether or not it is the best."""
        if (reason := self.why_not(node, kind)) is not None:
            raise LinkRefused(f"no {kind} link to {self._mesh.name_of(node)}: {reason}")
        async with _bounded(f"{self._mesh.name_of(node)} did not open a link"):
            match kind:
                case LinkKind.LOCAL:
                    link = await self._link_local(node, purpose)
                case LinkKind.TCP:
                    link = await self._link_tcp(node, purpose)
                case _:
                    return await self._link_quic(node, purpose)
        return self.through(node, link)

    async def _link_quic(self, node: NodeId, purpose: Purpose) -> socket.socket:
        stream = await self._mesh.open(node, "link", {"way": "quic", "purpose": purpose})
        await _taken(stream)
        ours, theirs = socket.socketpair()
        self._copy(theirs, stream, f"link to {node[:8]}")
        return self.through(node, ours)

    async def _link_local(self, node: NodeId, purpose: Purpose) -> socket.socket:
        return await self._by_ticket(
            node, purpose, LinkKind.LOCAL, lambda ticket, _: knock_local(link_door(node), ticket)
        )

    async def _link_tcp(self, node: NodeId, purpose: Purpose) -> socket.socket:
        # From where it is heard, and not from where it says: a peer is not to send us anywhere.
        host = self._mesh.paths.host_of(node)
        return await self._by_ticket(
            node, purpose, LinkKind.TCP, lambda ticket, port: knock_tcp(host, port, ticket)
        )

    async def _by_ticket(
        self,
        node: NodeId,
        purpose: Purpose,
        kind: LinkKind,
        knock: Callable[[bytes, int], Awaitable[socket.socket]],
    ) -> socket.socket:
        ticket = new_ticket()
        header = {"way": kind.value, "purpose": purpose, "ticket": ticket.hex()}
        stream = await self._mesh.open(node, "link", header)
        try:
            door = await stream.read_document()
            if "refused" in door:
                raise LinkRefused(refusal(door, "it gave no reason"))
            match door:
                case {"door": True, "port": int(port)} if 0 <= port < 1 << 16:
                    link = await knock(ticket, port)
                case _:
                    raise LinkFailed("it does not accept this kind of link")
            try:
                await _taken(stream)
            except BaseException:
                link.close()
                raise
            return link
        finally:
            with suppress(MeshError, OSError):
                await stream.finish()

    async def http(self, node: NodeId, epoch: int, turn: SlotRequest | None = None) -> socket.socket:
        """A connection to the engine of `node`; with a `turn` for one request, which waits for it.

        It can be used at once. The wait is the answer's, and so are its ends: 429 where the queue is
        full, 503 where it takes too long.
        """
        header: dict[str, Any] = {"epoch": epoch}
        if turn is not None:
            # The host has to tell clients apart, not to know them: addresses and keys stay here.
            header |= {"client": self._alias(turn.client), "resumed": turn.resumed}
            header |= {"name": self._alias(turn.name)} if turn.name else {}
            header |= {} if turn.within_s is None else {"within_s": turn.within_s}
        stream = await self._mesh.open(node, "http", header)
        ours, theirs = socket.socketpair()
        self._copy(theirs, stream, f"http to {node[:8]}")
        return ours

    def _alias(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), digest_size=16, key=self._salt).hexdigest()

    def _copy(self, link: socket.socket, stream: Stream, name: str) -> None:
        task = asyncio.create_task(self._copied(link, stream), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here, too: a task that is cancelled before its first step closes nothing.
        task.add_done_callback(lambda _: link.close())

    async def _copied(self, link: socket.socket, stream: Stream) -> None:
        report = await self._splice(link, stream)
        log.debug(
            "link ended sent=%d received=%d: %s", report.sent_bytes, report.received_bytes, report.reason
        )

    async def _splice(self, link: socket.socket, stream: Stream) -> SpliceReport:
        return await splice(link, stream.sending, stream.receiving, splicer=self.splicer)

    # -- from others ---------------------------------------------------------------------------

    async def serve_link(self, origin: NodeId, header: dict[str, Any], stream: Stream) -> None:
        """The stream's task: ends when the link does, or as soon as it needs no copying."""
        purpose = header.get("purpose")
        if not isinstance(purpose, dict):
            return
        try:
            if header.get("way") == "quic":
                await self._serve_quic(origin, purpose, stream)
            else:
                await self._serve_door(origin, purpose, header, stream)
        except MeshError as error:
            await stream.write_document({"refused": error.message})
            await stream.finish()

    async def _serve_quic(self, origin: NodeId, purpose: Purpose, stream: Stream) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            await self._receive(origin, purpose, theirs)
            await stream.write_document({"taken": True})
            await self._splice(ours, stream)

    async def _serve_door(
        self, origin: NodeId, purpose: Purpose, header: dict[str, Any], stream: Stream
    ) -> None:
        ticket = _ticket_of(header)
        door = self.door
        port = self._plain_port(origin) if header.get("way") == LinkKind.TCP else 0
        if door is None or port is None:
            await stream.write_document({})
            return
        async with _bounded("the link did not arrive"):
            arriving = door.expect(ticket)
            try:
                await stream.write_document({"door": True, "port": port})
                link = await arriving
            except BaseException:
                _give_up(arriving)
                raise
        await self._receive(origin, purpose, link)
        await stream.write_document({"taken": True})
        await stream.finish()

    def _plain_port(self, origin: NodeId) -> int | None:
        """Where `origin` may bring a link that is not encrypted; None where it may not."""
        if self.door is None or self._mesh.paths.of_links(origin) is not LinkKind.TCP:
            return None
        bound = None if self._bind_ip in ("0.0.0.0", "::") else self._bind_ip
        try:
            return self.door.listen(bound or facing(self._mesh.paths.host_of(origin)))
        except (LinkFailed, PeerLost) as error:
            log.info("cannot listen for plain links node=%s: %s", origin[:8], error.message)
            return None

    async def serve_http(self, account: str, header: dict[str, Any], stream: Stream) -> None:
        """The stream's task: requests of another node's gateway, until the connection ends."""
        try:
            guest = Guest.of(account, header)
        except ValueError:
            stream.reset(StreamCode.REFUSED)
            return
        ours, theirs = socket.socketpair()
        with ours:
            await self._answer(theirs, guest)
            await self._splice(ours, stream)


def _give_up(arriving: asyncio.Future[socket.socket]) -> None:
    """Its place is free at once, and a link that has come is closed."""
    if not arriving.cancel() and not arriving.cancelled() and arriving.exception() is None:
        arriving.result().close()


class _bounded:
    """`async with _bounded("… does not answer")`: time-outs and broken paths as one sentence."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence
        self._timeout = asyncio.timeout(LINK_OPEN_S)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise LinkRefused(f"{self._sentence} within {LINK_OPEN_S:.0f} s") from None
        return None


def _ticket_of(header: dict[str, Any]) -> bytes:
    try:
        ticket = bytes.fromhex(str(header.get("ticket")))
    except ValueError:
        ticket = b""
    if len(ticket) != LINK_TICKET_BYTES:
        raise LinkRefused("the ticket is invalid")
    return ticket


async def _taken(stream: Stream) -> None:
    answer = await stream.read_document()
    if "taken" not in answer:
        raise LinkRefused(refusal(answer, "the link was closed"))
