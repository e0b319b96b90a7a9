"""The request's body on its way to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.client_connection import ClientConnection
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import Exchange

# Others say that they have none; some servers would wait for one (RFC 9110, 8.6).
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_SMALL_BYTES = 64 << 10
"""Kept of a body whatever is kept of others: most are no longer, and hundreds of them are little."""

Keep = Callable[[int], bool]
"""Is told how many more bytes are kept, and says whether there is room for others; may refuse them."""


class KeptBodies:
    """What is kept of the bodies of all requests together, to be sent again."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0

    @contextmanager
    def share(self) -> Iterator[Keep]:
        """Of one request, until the end of the block."""
        own_bytes = 0

        def keep(size: int) -> bool:
            nonlocal own_bytes
            own_bytes += size
            self._bytes += size
            return self._bytes < self._limit_bytes

        try:
            yield keep
        finally:
            self._bytes -= own_bytes


class RequestBody:
    """All of what the client sends where it is small, else its start and the way to its rest."""

    def __init__(
        self,
        request: web.BaseRequest,
        exchange: Exchange,
        limits: Limits,
        keep: Keep,
    ) -> None:
        assert isinstance(request.protocol, ClientConnection)
        self._connection = request.protocol
        self._keep = keep
        self._content = request.content
        self._exchange = exchange
        self._limits = limits
        self._length = request.content_length
        self._method = request.method
        self.start = b""
        """All of it if it is complete, else what was taken in of it."""
        self.complete = not request.body_exists
        """Nothing more is to come: the body can be sent again."""
        self.failure: ApiError | None = None
        """Why the rest could not be had."""
        self.waiting = False
        """It is the client that everybody waits for."""

    @classmethod
    async def receive(
        cls,
        request: web.BaseRequest,
        exchange: Exchange,
        limits: Limits,
        *,
        keep: Keep = lambda _: True,
    ) -> RequestBody:
        """Let the client begin, and take in what may have to be sent a second time."""
        body = cls(request, exchange, limits, keep)
        if body._length is not None and body._length > limits.body_bytes:
            raise api_errors.body_too_large(limits.body_bytes)
        await body._let_begin(request)
        if body._length is None or body._length <= limits.replay_bytes:
            await body._read_start()
        return body

    def headers(self) -> dict[str, str]:
        """How the body is framed towards the engine; without a length it goes in chunks."""
        if self.complete:
            needed = self.start or self._method not in _WITHOUT_BODY
            return {"Content-Length": str(len(self.start))} if needed else {}
        if self._length is None:
            return {"Transfer-Encoding": "chunked"}
        return {"Content-Length": str(self._length)}

    def is_here(self, most_bytes: int) -> bool:
        """Whether there is all of it, and no more than that."""
        return self.complete and len(self.start) <= most_bytes

    def require(self, most_bytes: int) -> None:
        """Raises the refusal where it is not here to be read."""
        if max(len(self.start), self._length or 0) > most_bytes:
            raise api_errors.body_too_large(most_bytes)
        if not self.complete:
            raise api_errors.bodies_full()

    @property
    def chunked(self) -> bool:
        return not self.complete and self._length is None

    async def parts(self) -> AsyncIterator[bytes]:
        """What is there, then the rest as it arrives."""
        if self.start:
            yield self.start
        while not self.complete:
            try:
                chunk = await self._next_in_time()
            except ApiError as failure:
                self.failure = failure
                raise
            if chunk:
                yield chunk

    async def _let_begin(self, request: web.BaseRequest) -> None:
        expect = request.headers.get("Expect", "").lower()
        if not expect or request.version != HttpVersion11:
            return
        if expect != "100-continue":
            raise api_errors.bad_request("Expect may only ask for 100-continue", status=417)
        if not self.complete:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # The answer proper has not begun.
            request.writer.output_size = 0

    async def _read_start(self) -> None:
        parts: list[bytes] = []
        if self._content.is_eof() and not self._content.exception():
            # It came along with the head: there is nothing to wait for.
            self.start = self._taken(self._content.read_nowait())
            self._keep(len(self.start))
            self.complete = True
            return
        has_room = True
        while not self.complete and self._may_keep_more(has_room=has_room):
            try:
                async with asyncio.timeout(self._limits.silence_s):
                    parts.append(await self._next())
            except TimeoutError:
                raise api_errors.body_late(self._limits.silence_s) from None
            has_room = self._keep(len(parts[-1]))
        self.start = b"".join(parts)

    def _may_keep_more(self, *, has_room: bool) -> bool:
        most_bytes = self._limits.replay_bytes if has_room else _SMALL_BYTES
        return self._exchange.received_bytes <= most_bytes

    async def _next_in_time(self) -> bytes:
        """An engine, and perhaps one of its slots, waits for it: it may not come by drops."""
        limit_s = min(self._limits.upload_late_s, self._limits.silence_s)
        try:
            async with asyncio.timeout(limit_s):
                chunk = await self._next()
        except TimeoutError:
            raise api_errors.body_late(limit_s) from None
        if self._connection.late_s > limit_s:
            raise api_errors.body_late(limit_s)
        return chunk

    async def _next(self) -> bytes:
        # Stays true when a time limit cuts the wait short: that is how its cause is known.
        self.waiting = True
        try:
            chunk = await self._content.readany()
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise api_errors.bad_request("the request body is malformed") from error
        self.waiting = False
        self.complete = not chunk
        return self._taken(chunk)

    def _taken(self, chunk: bytes) -> bytes:
        self._exchange.received_bytes += len(chunk)
        if self._exchange.received_bytes > self._limits.body_bytes:
            raise api_errors.body_too_large(self._limits.body_bytes)
        return chunk
