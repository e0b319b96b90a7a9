"""The client's end of an answer: head, body and a proper end, or none that looks like one."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import Protocol

from aiohttp import web
from aiohttp.http import HttpVersion10
from multidict import CIMultiDict

from mesh_llm.gateway.client_connection import ClientConnection
from mesh_llm.gateway.stall_timer import StallTimer

_END_BYTES = 8 << 10
"""Of a body, where it tells what it has cost."""
_LINGER_NONE = struct.pack("ii", 1, 0)


class AnswerSource(Protocol):
    """Where the body comes from."""

    async def pour(self, sink: Callable[[bytes], None]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class AnswerWriter:
    """Takes payload, frames it for this client, and holds the source back while the client is full."""

    def __init__(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        *,
        silence_s: float,
    ) -> None:
        transport, connection = request.transport, request.protocol
        if transport is None:
            raise ConnectionResetError("the client has left")
        assert isinstance(connection, ClientConnection)
        self.response = response
        self._request = request
        self._connection = connection
        self._transport = transport
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._silence_s = silence_s
        self._first = self._before = self._last = b""
        self.payloads = 0
        """That were sent; of an event stream mostly one for each event."""
        self.sent_bytes = 0
        """Of the body, without its framing."""
        self.first_sent_s = 0.0
        """When the first of them left, by the monotonic clock."""

    @classmethod
    async def open(
        cls,
        request: web.BaseRequest,
        *,
        status: int,
        reason: str,
        headers: CIMultiDict[str],
        silence_s: float,
        body: bytes = b"",
    ) -> AnswerWriter:
        """Send the head, and `body` where all of that is there already."""
        # The head of a `Response` waits for its body: one packet instead of two, and the reader wakes once.
        together = bool(body) and "Content-Length" in headers
        kind = web.Response if together else web.StreamResponse
        response = kind(status=status, reason=reason, headers=headers)
        if request.version == HttpVersion10 and "Content-Length" not in headers:
            # Whatever it asks for: nothing but the end of the connection ends such a body.
            response.force_close()
        await response.prepare(request)
        answer_writer = cls(request, response, silence_s=silence_s)
        if together:
            await request.writer.write(body)
            answer_writer._count(body)
        else:
            answer_writer.take(body)
        return answer_writer

    async def pour_from(self, source: AnswerSource, sink: Callable[[bytes], None] | None = None) -> None:
        """All that `source` has, by way of `sink`; more may follow."""
        # The client holds one of the engine's slots; it may not do so and read nothing.
        stuck = StallTimer(self._silence_s, self._transport.abort)

        def pause() -> None:
            source.pause()
            stuck.watch()

        def resume() -> None:
            stuck.rest()
            source.resume()

        try:
            with self._connection.watched(pause, resume):
                await source.pour(sink or self.take)
        finally:
            resume()

    async def finish(self) -> None:
        """The end of a whole answer."""
        if not (self._chunked or self._connection.writing_paused):
            # All of it has left: there is nothing to wait for.
            await self.response.write_eof()
            return
        try:
            async with asyncio.timeout(self._silence_s):
                await self.response.write_eof()
                await self._request.writer.drain()
        except TimeoutError:
            # Written, and not read by a client that has stopped reading.
            self._transport.abort()

    def take(self, payload: bytes) -> None:
        """Every payload of the answer passes here, in order; for an event stream, mostly one event each."""
        if not payload or self._transport.is_closing():
            # An empty chunk is how HTTP says that the body has ended.
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._chunked else payload)
        self._count(payload)

    def _count(self, payload: bytes) -> None:
        self._before, self._last = self._last, payload
        self.payloads += 1
        if not self.sent_bytes:
            self._first = payload
            self.first_sent_s = time.monotonic()
        self.sent_bytes += len(payload)

    @property
    def ends(self) -> tuple[bytes, bytes]:
        """How the body begins and ends, as far as both are at hand."""
        return self._first[:_END_BYTES], (self._before + self._last)[-_END_BYTES:]

    async def break_off(self, last_words: bytes) -> None:
        """End an answer that has begun so that nobody takes it for a whole one.

        An event stream gets the reason as an event, one of lines as a line. Then the connection
        goes, without the last chunk that would make the end a clean one.
        """
        if (end := self._end_of_event()) is not None:
            # Half an event would swallow ours: end it first. Spaces are signs of life in a stream of lines.
            whole = not self._last.strip(b" ") or self._last.endswith(end)
            self.take(last_words if whole else end + last_words)
            await self._drain()
        elif self._request.version == HttpVersion10 and "Content-Length" not in self.response.headers:
            # This body ends where the connection does: only a reset tells that it is not whole.
            self._reset()
        self._connection.force_close()

    def _end_of_event(self) -> bytes | None:
        """How one ends, in a stream that takes another; None elsewhere."""
        headers = self.response.headers
        if "Content-Length" in headers or "Content-Encoding" in headers:
            return None
        kind = headers.get("Content-Type", "").lower()
        ends = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}
        return next((end for start, end in ends.items() if kind.startswith(start)), None)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                await self._request.writer.drain()
        except TimeoutError:
            self._transport.abort()

    def _reset(self) -> None:
        if not self._transport.is_closing():
            connected = self._transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            self._transport.abort()
