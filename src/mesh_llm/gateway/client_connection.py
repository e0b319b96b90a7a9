"""A client's connection: what aiohttp's server does, with words and flow control of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.guest import Guest
from mesh_llm.gateway.limits import Limits
from mesh_llm.third_party import require_aiohttp

GATEWAY_HEADER_LIMIT_BYTES = 16 << 10
"""Of a request line or one header: twice what browsers and proxies send at their worst."""
GATEWAY_LINGER_S = 5.0
"""To read on after a refusal, so that a client which sends its whole body first gets to see the reason."""
GATEWAY_HEAD_LIMIT_BYTES = 64 << 10
"""Of a request, all headers together: four headers at their limit, a hundred of the usual ones."""
GATEWAY_BODY_BYTES_PER_S = 16 << 10
"""The slowest that a body may arrive while others find no room: an old telephone line is faster."""
GATEWAY_TURNED_AWAY = 32
"""Connections over the limit that are told so; with more at once there is no time for words."""
GATEWAY_TURNED_AWAY_S = 1.0
"""To read why: closed at once, a connection whose request is still arriving loses the words, too."""


log = logging.getLogger(__name__)

require_aiohttp("gateway/client_connection.py")

ALL_HEADERS = f"the request's headers are longer than {GATEWAY_HEAD_LIMIT_BYTES >> 10} KiB in all"


class ClientConnection(web.RequestHandler):
    def __init__(
        self, server: ClientServer, limits: Limits, guest: Guest | None = None, **options: Any
    ) -> None:
        super().__init__(server, **options)
        self._server = server
        self._limits = limits
        self.guest = guest
        """The other node at the end of it; None for a client of this one."""
        self._is_full = False
        self._on_full: Callable[[], None] | None = None
        self._on_room: Callable[[], None] | None = None
        self._refused = False
        """It has got its last answer; whatever else it sends is ignored."""
        self._head_bytes = 0
        """Of a request's head that has begun to arrive."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._payload: StreamReader | None = None
        """The body of its last request."""
        self._paid_s = 0.0
        """Up to when what has come of the body would have taken, at the slowest that it may come."""
        self._paused_s = 0.0
        """When its reading was paused."""

    # -- who gets in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        refusal = self._server.refusal(self)
        if refusal is None:
            super().connection_made(transport)
        else:
            self._refused = True
            self._server.turn_away(self, cast(asyncio.Transport, transport), refusal)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_ended()
        self._server.forget(self)
        super().connection_lost(exc)

    @property
    def is_leaving(self) -> bool:
        return self._force_close or self._refused

    @property
    def is_idle(self) -> bool:
        """It waits for a request, the first one or the next one, or for the rest of its head."""
        if self.is_leaving:
            return False
        return not self._request_count or (self._waiter is not None and not self._waiter.done())

    @property
    def idle_until_s(self) -> float:
        """When it will be closed for it; the smaller, the longer it has been idle."""
        return self._next_keepalive_close_time

    def begin(self, payload: StreamReader) -> None:
        """A request has begun."""
        self._payload = payload
        self._paid_s = self._loop.time()

    @property
    def late_s(self) -> float:
        """How far the body of its request is behind the slowest pace; 0 where nobody waits for the client."""
        if self.is_leaving or self._payload is None or self._payload.is_eof() or self._reading_paused:
            return 0.0
        return self._loop.time() - self._paid_s

    def pause_reading(self) -> None:
        self._paused_s = self._loop.time()
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls this for every body, paused or not, and has its parser look for more each time.
        if self._reading_paused:
            self._paid_s += self._loop.time() - self._paused_s
            super().resume_reading(resume_parser)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._paid_s = min(self._paid_s + len(data) / GATEWAY_BODY_BYTES_PER_S, self._loop.time())
        was_idle = self.is_idle
        super().data_received(data)
        if not was_idle:
            return
        if not self.is_idle:
            self._head_ended()
            return
        # The keep-alive limit is no help: it grants more than a minute to send one byte after the other.
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(
                self._limits.head_s, self._break_off, api_errors.head_late(self._limits.head_s)
            )
        self._head_bytes += len(data)
        if self._head_bytes > GATEWAY_HEAD_LIMIT_BYTES:
            self._break_off(api_errors.head_too_large(ALL_HEADERS))

    def _head_ended(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _break_off(self, failure: ApiError) -> None:
        """Refuse a request whose head is not all there."""
        self._head_ended()
        if self.transport is not None and self.is_idle:
            self._refused = True
            self.close()
            self._server.turn_away(self, self.transport, failure)

    # -- flow control --------------------------------------------------------------------------

    @contextmanager
    def watched(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> Iterator[None]:
        """Tell when the client does not keep up with what is written to it, and when it does again."""
        self._on_full, self._on_room = on_full, on_room
        try:
            if self._is_full:
                on_full()
            yield
        finally:
            self._on_full = self._on_room = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_full = True
        if self._on_full is not None:
            self._on_full()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_full = False
        if self._on_room is not None:
            self._on_room()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Refuse in OpenAI's shape what is not even a request."""
        # The text of the exception quotes the request, keys included: it goes nowhere.
        log.debug("unreadable request error=%s", type(exc).__name__)
        if isinstance(exc, LineTooLong):
            limit = f"{GATEWAY_HEADER_LIMIT_BYTES >> 10} KiB"
            failure = api_errors.head_too_large(f"the request line or a header is longer than {limit}")
        elif isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message:
            failure = api_errors.head_too_large("the request has too many headers")
        elif status < 500:
            failure = api_errors.bad_request("this is not an HTTP request that can be read", status=status)
        else:
            failure = api_errors.internal()
        return failure.response()


def check_head(request: web.BaseRequest) -> None:
    """Refuse what is too large but came in so few packets that nobody had to wait for its end."""
    if sum(len(name) + len(value) for name, value in request.raw_headers) > GATEWAY_HEAD_LIMIT_BYTES:
        raise api_errors.head_too_large(ALL_HEADERS)


class ClientServer(web.Server):
    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: Limits
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._limits = limits
        self._turned_away: dict[ClientConnection, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def __call__(self) -> web.RequestHandler:
        return self.connection()

    def connection(self, guest: Guest | None = None) -> ClientConnection:
        return ClientConnection(
            self,
            self._limits,
            guest,
            loop=asyncio.get_running_loop(),
            # The gateway logs for itself, the requests that were cancelled as well.
            access_log=None,
            keepalive_timeout=self._limits.idle_s,
            lingering_time=GATEWAY_LINGER_S,
            max_line_size=GATEWAY_HEADER_LIMIT_BYTES,
            max_field_size=GATEWAY_HEADER_LIMIT_BYTES,
            auto_decompress=False,
        )

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if isinstance(protocol, ClientConnection):
            protocol.begin(payload)
        return super()._make_request(message, payload, protocol, writer, task)

    def refusal(self, newcomer: ClientConnection) -> ApiError | None:
        """Why there is no room for one more connection; others may have to go for it."""
        connections = [
            each for each in self.connections if isinstance(each, ClientConnection) and not each.is_leaving
        ]
        if newcomer.guest is not None:
            account = newcomer.guest.account
            of_account = [each for each in connections if each.guest and each.guest.account == account]
            if not self._make_room(of_account, self._limits.connections_per_account):
                return api_errors.busy(1)
        return None if self._make_room(connections, self._limits.connections) else api_errors.crowded()

    def _make_room(self, connections: list[ClientConnection], limit: int) -> bool:
        """Idle ones go first, the longest idle before the others; then those whose bodies do not come."""
        idle = [each for each in connections if each.is_idle]
        if len(connections) < limit and len(idle) < self._limits.idle_connections:
            return True
        if idle:
            min(idle, key=lambda each: each.idle_until_s).force_close()
            return True
        latest = max(connections, key=lambda each: each.late_s)
        if latest.late_s < self._limits.body_late_s:
            return False
        log.info("a body that does not come makes room late_s=%.1f", latest.late_s)
        latest.force_close()
        return True

    def turn_away(self, client: ClientConnection, transport: asyncio.Transport, failure: ApiError) -> None:
        """Say why, and stay for a moment: closed at once, what is still arriving would undo the words."""
        if len(self._turned_away) >= GATEWAY_TURNED_AWAY:
            transport.abort()
            return
        transport.write(failure.wire())
        if transport.can_write_eof():
            transport.write_eof()
        timer = asyncio.get_running_loop().call_later(GATEWAY_TURNED_AWAY_S, transport.abort)
        self._turned_away[client] = transport, timer

    def forget(self, client: ClientConnection) -> None:
        """It is gone."""
        if client in self._turned_away:
            _, timer = self._turned_away.pop(client)
            timer.cancel()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        for transport, _ in self._turned_away.values():
            transport.abort()
        await super().shutdown(timeout)
