"""One HTTP/1.1 connection to an engine.

The request's task sends a request and waits for the head of its answer. The body then goes
from the socket's callback straight into a sink: no task wakes up and no timer is set for a
token. Any transport will do, as long as it can pause its reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

from mesh_llm.gateway.http_framing import FramedBody, Head, MalformedAnswer, body_of, split_head
from mesh_llm.gateway.stall_timer import StallTimer
from mesh_llm.gateway.upstream import Upstream

GATEWAY_HELD_BYTES = 64 << 10
"""Of an answer's body, while its head is on its way to the client; as much as a transport buffers."""
GATEWAY_AT_ONCE_BYTES = 32 << 10
"""Of a body that leaves together with its head: too few for aiohttp to wait until they are read."""


Sink = Callable[[bytes], None]

_LAST_CHUNK = b"0\r\n\r\n"


class EngineError(Exception):
    """The engine, or the way to it, failed; not the client."""

    engine: Upstream | None = None
    """Of several engines of one plan, the one that did."""


class EngineLost(EngineError):
    """The connection ended before the answer did, or could not be made."""


class EngineSilent(EngineError):
    """Nothing was heard for too long."""


class EngineGarbled(EngineError):
    """What it sent is not an HTTP answer."""


class EngineConnection(asyncio.Protocol):
    """Requests and their answers, one after the other.

    For each: `send` (or `upload`), `head`, `pour`. `reusable` says whether another may follow.
    """

    def __init__(self, *, silence_s: float, on_lost: Callable[[EngineConnection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stall_timer = StallTimer(silence_s, self._on_silence)
        self._on_lost = on_lost
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._reading = True
        self._sink_is_full = False
        self.idle_since_s = 0.0
        """When the last answer ended, by the loop's clock."""
        self._begin("", sent=True)

    def _begin(self, method: str, *, sent: bool) -> None:
        self._method = method
        self._sent = sent
        """All of the request is on its way."""
        self.answered = False
        """At least a byte of the answer has arrived."""
        self._raw_head = b""
        self._head: Head | None = None
        self._body: FramedBody | None = None
        self._has_begun = False
        """Something of the body has arrived."""
        self._whole = False
        self._error: EngineError | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._sink: Sink = self._hold

    # -- what the request's task does ---------------------------------------------------------

    def send(self, method: str, request: bytes) -> None:
        """Send a request that is all there."""
        self._begin(method, sent=True)
        self._stall_timer.watch()
        self._transport.write(request)

    async def upload(self, method: str, head: bytes, parts: AsyncIterator[bytes], *, chunked: bool) -> None:
        """Send a request whose body is still arriving; its answer may begin before this ends."""
        self._begin(method, sent=False)
        self._stall_timer.watch()
        self._transport.write(head)
        async for part in parts:
            self._stall_timer.heard()
            if self._transport.is_closing():
                return
            if not part:
                continue  # an empty chunk would end the body
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            await self._can_write.wait()
            self._stall_timer.heard()
        if chunked:
            self._transport.write(_LAST_CHUNK)
        self._sent = True

    async def head(self) -> Head:
        """The head of the answer, when it has arrived; unless it is a stream, its body has begun, too."""
        while self._head is None or not (self._has_begun or self._whole or self._head.is_stream):
            if self._error is not None:
                raise self._error
            await self._news()
        if self._whole and not self._has_begun and _owes_body(self._head, self._method):
            raise EngineLost("the answer has no body")
        return self._head

    def take_short(self) -> bytes:
        """The answer's body, where all of it came along with the head, and is short; else nothing."""
        if not self._whole or self._held_bytes > GATEWAY_AT_ONCE_BYTES:
            return b""
        held, self._held = self._held, []
        return b"".join(held)

    async def pour(self, sink: Sink) -> None:
        """Hand the answer's body to `sink` as it arrives, and return when that was all of it."""
        self._sink = sink
        held, self._held = self._held, []
        try:
            for payload in held:
                sink(payload)
        except MalformedAnswer as error:
            raise EngineGarbled(str(error)) from error
        self._held_bytes = 0
        self._set_reading()
        while not self._whole:
            if self._error is not None:
                raise self._error
            await self._news()
        await self.head()

    def pause(self) -> None:
        """Read nothing for now: the sink is full."""
        self._sink_is_full = True
        self._set_reading()

    def resume(self) -> None:
        self._sink_is_full = False
        self._set_reading()

    @property
    def reusable(self) -> bool:
        """The answer ended as it should, and the engine means to take another request."""
        return (
            self._whole and self._sent and self._head is not None and self._head.kept and not self.is_closing
        )

    @property
    def is_closing(self) -> bool:
        return self._lost or self._transport.is_closing()

    def close(self) -> None:
        """At once, which makes the engine stop working on what it was asked."""
        self._stall_timer.rest()
        self._transport.abort()

    def fail(self, error: EngineError) -> None:
        """Whoever waits for the answer gets `error` instead."""
        self._error = error
        self._wake()
        self.close()

    def _set_reading(self) -> None:
        wanted = not self._sink_is_full and self._held_bytes <= GATEWAY_HELD_BYTES
        if wanted == self._reading or self.is_closing:
            return
        self._reading = wanted
        if not wanted:
            # It is not the engine that keeps everybody waiting.
            self._stall_timer.rest()
            self._transport.pause_reading()
            return
        if not self._whole:
            self._stall_timer.watch()
        self._transport.resume_reading()

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the socket does -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._stall_timer.heard()
        try:
            if self._body is None:
                self._read_head(data)
                return
            payload = self._body.feed(data)
            if payload:
                self._sink(payload)
                if not self._has_begun:
                    self._has_begun = True
                    self._wake()
            if self._body.done:
                self._finish(self._body)
        except MalformedAnswer as error:
            self.fail(EngineGarbled(str(error)))
        except EngineError as error:
            # The sink has seen enough.
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._stall_timer.rest()
        self._can_write.set()
        if self._error is None:
            if self._body is not None and error is None and self._body.closed():
                self._whole = True
            else:
                self._error = EngineLost(str(error or "the connection was closed"))
        self._wake()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _read_head(self, data: bytes) -> None:
        if not self._method or self._error is not None:
            # Nobody has asked.
            self.close()
            return
        self.answered = True
        found = split_head(self._raw_head + data)
        while found is not None and found[0].status < 200:
            # 100 and the like: the answer proper follows.
            self._raw_head, data = b"", found[1]
            found = split_head(data)
        if found is None:
            self._raw_head += data
            return
        self._raw_head = b""
        head, rest = found
        self._body = body_of(head, self._method)
        self._head = head
        self._wake()
        if rest or self._body.done:
            self.data_received(rest)

    def _finish(self, body: FramedBody) -> None:
        self._whole = True
        self._stall_timer.rest()
        self._wake()
        if body.surplus:
            self.close()

    def _hold(self, payload: bytes) -> None:
        """Until somebody has got ready to take it."""
        self._held.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes > GATEWAY_HELD_BYTES:
            self._set_reading()

    def _on_silence(self) -> None:
        self.fail(EngineSilent())


def _owes_body(head: Head, method: str) -> bool:
    """An engine that ends while it computes may send a proper head and nothing else."""
    return method != "HEAD" and (head.status == 200 or head.status >= 500)
