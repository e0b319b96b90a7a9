"""A client's connection: what aiohttp's server does, with words and flow control of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from mesh_llm.defaults import GATEWAY_CLIENT_IDLE_S, GATEWAY_HEADER_LIMIT_BYTES, GATEWAY_LINGER_S
from mesh_llm.gateway import failures

log = logging.getLogger(__name__)


class ClientConnection(web.RequestHandler):
    _is_full = False
    _on_full: Callable[[], None] | None = None
    _on_room: Callable[[], None] | None = None

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
            failure = failures.bad_request(
                f"the request line or a header is longer than {limit}", status=431, code="header_too_large"
            )
        elif status < 500:
            failure = failures.bad_request("this is not an HTTP request that can be read", status=status)
        else:
            failure = failures.internal()
        return failure.response()


class ClientServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return ClientConnection(
            self,
            loop=asyncio.get_running_loop(),
            # The gateway logs for itself, the requests that were cancelled as well.
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=GATEWAY_CLIENT_IDLE_S,
            lingering_time=GATEWAY_LINGER_S,
            max_line_size=GATEWAY_HEADER_LIMIT_BYTES,
            max_field_size=GATEWAY_HEADER_LIMIT_BYTES,
            auto_decompress=False,
        )
