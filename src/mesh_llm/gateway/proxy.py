"""Send a request on to the engine as it came, and the engine's answer back as it arrives."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion10
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from mesh_llm.defaults import (
    GATEWAY_CONNECT_S,
    GATEWAY_ENGINE_IDLE_S,
    GATEWAY_EXPLAIN_S,
    GATEWAY_HEADER_LIMIT_BYTES,
    GATEWAY_METRICS_S,
)
from mesh_llm.gateway import failures
from mesh_llm.gateway.body import Body
from mesh_llm.gateway.failures import Failure
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import BROKEN, Exchange
from mesh_llm.gateway.upstream import Serving, Upstream

log = logging.getLogger(__name__)

# RFC 9110, 7.6.1: these speak of one connection, not of the message. Proxy-* go the same way, below.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
# Ours to say towards the engine: its name, its key, and the framing of the body.
_REPLACED = frozenset({"host", "authorization", "x-api-key", "content-length", "expect"})
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_ENGINE_ERRORS = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError)
_SMALL_CHUNK_BYTES = 16 << 10
"""Well below what a transport buffers before it asks its writer to wait."""
_LINGER_NONE = struct.pack("ii", 1, 0)


def _end_to_end(headers: CIMultiDictProxy[str], *, without: Iterable[str] = ()) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    dropped = _HOP_BY_HOP.union(named, without)
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not name.lower().startswith("proxy-")
    )


class Relay:
    """The way to the engine and back, for all requests of one gateway."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self._serving = serving
        self._limits = limits
        reused = aiohttp.TraceConfig()
        reused.on_connection_reuseconn.append(_note_reuse)
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=GATEWAY_ENGINE_IDLE_S)
        self._pool = _session(kept, limits, traces=[reused])
        # For what cannot be sent twice, and for the second time: a connection nobody has used before.
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True), limits, traces=[])

    async def close(self) -> None:
        await self._pool.close()
        await self._fresh.close()

    async def answer(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        target = _target(request)
        headers = _end_to_end(request.headers, without=_REPLACED)
        _check_encodable(target, headers)
        self._upstream()
        body = await Body.receive(request, exchange, self._limits)
        # Asked again: the body may have taken its time, and the engine may be another one by now.
        upstream = self._upstream()
        headers.update({"Authorization": f"Bearer {upstream.key}", **body.headers()})
        url = URL(upstream.url + target, encoded=True)
        try:
            reply = await self._ask(request.method, url, headers, body)
        except _ENGINE_ERRORS as error:
            raise (body.failure or await self._failure(error, upstream, body)) from error
        try:
            return await self._hand_back(request, reply, upstream, exchange)
        finally:
            # After a whole answer this does nothing; after part of one it makes the engine stop.
            reply.close()

    async def engine_metrics(self) -> bytes:
        """The engine's own series, or nothing where it has none to give in time."""
        upstream = self._serving.upstream()
        if upstream is None:
            return b""
        headers = {"Authorization": f"Bearer {upstream.key}"}
        try:
            async with (
                asyncio.timeout(GATEWAY_METRICS_S),
                self._pool.get(
                    upstream.url + "/metrics", headers=headers, trace_request_ctx=SimpleNamespace()
                ) as reply,
            ):
                return await reply.read() if reply.status == 200 else b""
        except _ENGINE_ERRORS:
            return b"# the engine gave no metrics\n"

    async def break_off(self, request: web.BaseRequest, exchange: Exchange, failure: Failure) -> None:
        """End an answer that has begun so that nobody takes it for a whole one.

        An event stream gets the reason as an event. Then the connection goes, without the
        last chunk that would make the end a clean one.
        """
        exchange.outcome = BROKEN
        response, transport = exchange.response, request.transport
        if response is None or transport is None:
            return
        if _takes_events(response):
            # Half an event would swallow ours: end it first.
            whole = not exchange.tail or exchange.tail.endswith(b"\n\n")
            await self._write(request, exchange, failure.event() if whole else b"\n\n" + failure.event())
        elif request.version == HttpVersion10 and "Content-Length" not in response.headers:
            # This body ends where the connection does: only a reset tells that it is not whole.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            transport.abort()
        request.protocol.force_close()

    def _upstream(self) -> Upstream:
        upstream = self._serving.upstream()
        if upstream is None:
            raise failures.not_serving(self._serving.health())
        return upstream

    async def _ask(
        self, method: str, url: URL, headers: CIMultiDict[str], body: Body
    ) -> aiohttp.ClientResponse:
        attempt = SimpleNamespace(reused=False)
        session = self._pool if body.complete else self._fresh
        try:
            return await _send(session, method, url, headers, body, attempt)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # The engine closes idle connections, perhaps in the moment in which we chose one, and
            # each one that it has streamed on, although it promises to keep it.
            if not (attempt.reused and body.complete):
                raise
        return await _send(self._fresh, method, url, headers, body, attempt)

    async def _hand_back(
        self,
        request: web.BaseRequest,
        reply: aiohttp.ClientResponse,
        upstream: Upstream,
        exchange: Exchange,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=reply.status, reason=reply.reason, headers=_end_to_end(reply.headers)
        )
        await response.prepare(request)
        exchange.response = response
        while True:
            try:
                chunk = await reply.content.readany()
            except _ENGINE_ERRORS as error:
                await self.break_off(request, exchange, await self._failure(error, upstream))
                return response
            if not chunk:
                break
            await self._write(request, exchange, chunk)
        await response.write_eof()
        return response

    async def _write(self, request: web.BaseRequest, exchange: Exchange, chunk: bytes) -> None:
        assert exchange.response is not None
        try:
            if _is_taken_at_once(request.transport, chunk):
                await exchange.response.write(chunk)
            else:
                async with asyncio.timeout(self._limits.silence_s):
                    await exchange.response.write(chunk)
        except TimeoutError:
            # It holds one of the engine's slots and reads nothing.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None
        exchange.sent(chunk)

    async def _failure(self, error: BaseException, upstream: Upstream, body: Body | None = None) -> Failure:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            late = body is not None and body.waiting
            return (failures.body_late if late else failures.engine_silent)(self._limits.silence_s)
        try:
            async with asyncio.timeout(GATEWAY_EXPLAIN_S):
                sentence = await self._serving.engine_failure(upstream)
        except TimeoutError:
            sentence = "the engine closed the connection"
        log.warning("engine lost url=%s error=%r why=%s", upstream.url, error, sentence)
        return failures.engine_lost(sentence)


def _is_taken_at_once(transport: asyncio.Transport | None, chunk: bytes) -> bool:
    """A token for a client that keeps up: there is nothing to wait for, and a timer is not free."""
    return transport is not None and len(chunk) < _SMALL_CHUNK_BYTES and not transport.get_write_buffer_size()


def _takes_events(response: web.StreamResponse) -> bool:
    plain = "Content-Length" not in response.headers and "Content-Encoding" not in response.headers
    return plain and response.headers.get("Content-Type", "").lower().startswith("text/event-stream")


def _session(
    connector: aiohttp.TCPConnector, limits: Limits, *, traces: list[aiohttp.TraceConfig]
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(sock_connect=GATEWAY_CONNECT_S, sock_read=limits.silence_s),
        auto_decompress=False,
        # One client's cookies are not the next one's.
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NOT_ADDED,
        max_line_size=GATEWAY_HEADER_LIMIT_BYTES,
        max_field_size=GATEWAY_HEADER_LIMIT_BYTES,
        trace_configs=traces,
    )


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    context.trace_request_ctx.reused = True


async def _send(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    headers: CIMultiDict[str],
    body: Body,
    attempt: SimpleNamespace,
) -> aiohttp.ClientResponse:
    # The session's own limit on silence begins when the body is sent; an upload moves this one on until then.
    async with asyncio.timeout(None) as body.bound:
        try:
            return await session.request(
                method,
                url,
                headers=headers,
                data=body.data(),
                allow_redirects=False,
                trace_request_ctx=attempt,
            )
        finally:
            body.bound = None


def _target(request: web.BaseRequest) -> str:
    """The path and query as the client wrote them.

    Always with a leading slash: appended to the engine's address, `@elsewhere/` would
    send the request, and the engine's key, elsewhere.
    """
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/") or request.method == "CONNECT":
        raise failures.bad_request("the request names no path of this API")
    return target


def _check_encodable(target: str, headers: CIMultiDict[str]) -> None:
    try:
        target.encode()
        for name, value in headers.items():
            name.encode()
            value.encode()
    except UnicodeEncodeError:
        raise failures.bad_request("the request's path and headers must be UTF-8") from None
