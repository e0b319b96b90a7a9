"""A member of the mesh that is connected."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from mesh_llm.defaults import CONNECT_S
from mesh_llm.errors import PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.transport.close_codes import CloseReason, Code, close, closing_of
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.framing import FrameError, FrameType, encode_frame
from mesh_llm.transport.handshake import Introduction
from mesh_llm.transport.iroh_library import iroh, message_of
from mesh_llm.transport.stream import Stream, StreamCode
from mesh_llm.transport.stream_gate import StreamGate
from mesh_llm.types import LinkKind, NodeId, Role

PEER_QUEUE_FRAMES = 1024
PEER_QUEUE_BYTES = 4 << 20
"""Control messages that wait to be sent. A peer that far behind is not reading any more."""
PEER_STREAMS_LIMIT = 512
"""Opened by one peer at once: all its requests and links."""
STREAM_HEADER_S = 10.0
"""For a stream that was opened to say what it is for."""


log = logging.getLogger(__name__)

WRITE_BYTES = 64 << 10
KIND_LENGTH = 64


@frozen
class PathFacts:
    """The way that a connection's packets take now."""

    kind: LinkKind
    rtt_s: float
    """QUIC's smoothed estimate, in whole milliseconds."""
    remote: str


@frozen
class Crossed:
    """What a connection has sent and received, on whatever path."""

    sent_bytes: int
    received_bytes: int


class Handler(Protocol):
    """What a network tells its node. All but `on_stream` return at once."""

    def on_peer(self, peer: Peer) -> None:
        """Admitted; messages and streams may follow."""

    def on_lost(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None: ...

    async def on_stream(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        """Serves one stream; cancelled with the peer. The stream is finished when this returns."""

    def kinds_for(self, role: Role) -> Collection[str]:
        """The kinds of streams that a peer of this role may open."""

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        """What a node that joins is told."""

    def on_duplicate(self) -> None:
        """Another node runs with this node's identity."""

    def on_refused(self, node: NodeId, reason: str) -> None:
        """A stranger that wanted to be a member was sent away; `reason` follows "it was refused:"."""

    def on_address(self) -> None:
        """This node's own address has changed."""


class Peer:
    """Made by a network, which also runs it."""

    def __init__(
        self,
        *,
        introduction: Introduction,
        connection: Any,
        control: ControlStream,
        gate: StreamGate,
        handler: Handler,
        confirm: bool,
    ) -> None:
        self.id: NodeId = introduction.node
        self.role: Role = introduction.role
        self.credential: Credential = introduction.credential
        self.instance = introduction.instance
        self.link = introduction.link
        self.closing: CloseReason | None = None
        """Why it ended, once it has."""
        self.ended_here = False
        """Whether it was this side that ended it."""
        self.unknown_frames = 0
        self.refused_streams = 0
        self._connection = connection
        self._control = control
        self._gate = gate
        self._handler = handler
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._has_work = asyncio.Event()
        if confirm:
            self._enqueue(encode_frame(FrameType.CONFIRM, {}))
        self._tasks: set[asyncio.Task[None]] = set()
        self._path: PathFacts | None = None
        self._ended = False

    def __repr__(self) -> str:
        return f"Peer({self.id[:10]}, {self.role})"

    # -- for the node ----------------------------------------------------------------------------

    def send(self, body: dict[str, Any]) -> None:
        """Queue a message. Never waits: a peer that does not keep up is closed."""
        if self.closing is not None:
            return
        try:
            frame = encode_frame(FrameType.MESSAGE, body)
        except (FrameError, ValueError) as error:
            # Others' words may be part of it: that is no reason for this node to fail.
            log.warning("message not sent peer=%s: %s", self.id[:8], error)
            return
        self._enqueue(frame)
        if len(self._queue) > PEER_QUEUE_FRAMES or self._queued_bytes > PEER_QUEUE_BYTES:
            self.end(Code.OVERFLOW)

    async def open(self, kind: str, header: dict[str, Any]) -> Stream:
        """A new stream, which the other node's handler serves if this node's role may open its kind."""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = Stream(await self._connection.open_bi(), self._spawn)
                await stream.write_document({"kind": kind, "header": header})
            opened, stream = stream, None
            return opened
        except TimeoutError:
            raise PeerLost(f"no stream to node {self.id[:10]} within {CONNECT_S:.0f} s") from None
        except iroh().IrohError as error:
            raise PeerLost(f"no stream to node {self.id[:10]}: {message_of(error)}") from None
        finally:
            if stream is not None:
                stream.reset()

    def path(self) -> PathFacts:
        """Of the path in use; of the last one while there is none."""
        paths = [] if self.closing is not None else self._connection.paths()
        chosen = next((path for path in paths if path.is_selected), paths[0] if paths else None)
        if chosen is not None:
            self._path = PathFacts(
                kind=LinkKind.RELAY if chosen.is_relay else LinkKind.QUIC,
                rtt_s=chosen.rtt_ms / 1000,
                remote=chosen.remote_addr,
            )
        if self._path is None:
            raise PeerLost(f"there is no path to node {self.id[:10]}")
        return self._path

    def crossed(self) -> Crossed:
        """Since it was connected; also while iroh knows of no path, for packets may go both ways then."""
        stats = self._connection.stats()
        return Crossed(sent_bytes=stats.udp_tx_bytes, received_bytes=stats.udp_rx_bytes)

    @property
    def left(self) -> bool:
        """Whether it said that it stops."""
        return self.closing is not None and self.closing.code is Code.LEAVING and not self.ended_here

    def close(self, reason: str = "") -> None:
        """At once, whether or not the other side can still be reached."""
        self.end(Code.CLOSED, reason)

    # -- for the network -------------------------------------------------------------------------

    def end(self, code: Code, reason: str = "") -> None:
        if self.closing is None:
            self.ended_here = True
            self.closing = close(self._connection, code, reason)

    async def run(self) -> CloseReason:
        """Until the connection ends; everything of this peer's has ended when this returns."""
        self._connection.set_max_concurrent_bi_streams(PEER_STREAMS_LIMIT)
        self._spawn(self._read(), "read messages")
        self._spawn(self._write(), "write messages")
        self._gate.open(
            deliver=lambda pair: self._spawn(self._serve(pair), "serve a stream"),
            misused=lambda: self.end(Code.MALFORMED),
        )
        try:
            words = await self._connection.closed()
            if self.closing is None:
                self.closing = closing_of(words)
            return self.closing
        finally:
            self.end(Code.CLOSED)
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        self._ended = True
        while self._tasks:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        if self._ended:
            # A stream that outlived its peer: there is nothing left to do for it.
            work.close()
            return
        task = asyncio.create_task(work, name=f"{what} of {self.id[:10]}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake of ours, which one peer may cost, and no more.
            log.error("closing peer=%s after an internal error", self.id, exc_info=error)
            self.end(Code.INTERNAL)

    def _enqueue(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._has_work.set()

    async def _read(self) -> None:
        # Lost connections are the business of `run`, which hears of them, too.
        with suppress(iroh().IrohError):
            try:
                while (frame := await self._control.read()) is not None:
                    if frame.type == FrameType.MESSAGE:
                        self._handler.on_message(self, frame.body)
                    else:
                        self.unknown_frames += 1
                self.end(Code.MALFORMED, "the control stream ended")
            except FrameError as error:
                self.end(Code.MALFORMED, f"not of this protocol: {error}")

    async def _write(self) -> None:
        with suppress(iroh().IrohError):
            while True:
                await self._has_work.wait()
                parts: list[bytes] = []
                size = 0
                while self._queue and size < WRITE_BYTES:
                    parts.append(self._queue.popleft())
                    size += len(parts[-1])
                if not self._queue:
                    self._has_work.clear()
                await self._control.write_encoded(b"".join(parts))
                self._queued_bytes -= size

    async def _serve(self, pair: Any) -> None:
        stream = Stream(pair, self._spawn)
        try:
            async with asyncio.timeout(STREAM_HEADER_S):
                document = await stream.read_document()
        except (PeerLost, TimeoutError):
            stream.reset(StreamCode.REFUSED)
            return
        kind, header = document.get("kind"), document.get("header")
        if not self._may_open(kind) or not isinstance(header, dict):
            self.refused_streams += 1
            stream.reset(StreamCode.REFUSED)
            return
        try:
            await self._handler.on_stream(self, str(kind), header, stream)
        except PeerLost:
            stream.reset(StreamCode.CANCELLED)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("failed to serve a stream kind=%s peer=%s", kind, self.id)
            stream.reset(StreamCode.FAILED)
        else:
            await stream.leave()

    def _may_open(self, kind: object) -> bool:
        if not isinstance(kind, str) or len(kind) > KIND_LENGTH:
            return False
        return kind in self._handler.kinds_for(self.role)
