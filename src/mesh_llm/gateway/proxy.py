"""Send a request on to the engine as it came, and the engine's answer back as it arrives."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from mesh_llm.defaults import GATEWAY_EXPLAIN_S, GATEWAY_METRICS_S
from mesh_llm.gateway import failures
from mesh_llm.gateway.body import Body
from mesh_llm.gateway.connection import EngineConnection, EngineError, EngineLost, EngineSilent
from mesh_llm.gateway.failures import Failure
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.gateway.outlet import Outlet
from mesh_llm.gateway.pool import Pool
from mesh_llm.gateway.upstream import Serving, Upstream

log = logging.getLogger(__name__)

# RFC 9110, 7.6.1: these speak of one connection, not of the message. Proxy-* go the same way, below.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
# Ours to say towards the engine: its name, its key, and the framing of the body.
_REPLACED = frozenset({"host", "authorization", "x-api-key", "content-length", "expect"})
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


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
        self._pool = Pool(limits)

    def close(self) -> None:
        self._pool.close()

    async def answer(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        target = _target(request)
        headers = _end_to_end(request.headers, without=_REPLACED)
        self._upstream()
        body = await Body.receive(request, exchange, self._limits)
        # Asked again: the body may have taken its time, and the engine may be another one by now.
        upstream = self._upstream()
        head = _request_head(request.method, target, upstream, headers, body.headers())
        try:
            if not body.complete:
                return await self._upload(request, exchange, upstream, head, body)
            connection = await self._ask(upstream, request.method, head + body.start)
            return await self._hand_back(request, exchange, upstream, connection)
        except EngineError as error:
            raise (body.failure or await self._failure(error, upstream, body)) from error

    async def engine_metrics(self) -> bytes:
        """The engine's own series, or nothing where it has none to give in time."""
        upstream = self._serving.upstream()
        if upstream is None:
            return b""
        head = _request_head("GET", "/metrics", upstream, CIMultiDict(), {})
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(GATEWAY_METRICS_S):
                connection = await self._ask(upstream, "GET", head)
                try:
                    await connection.pour(parts.append)
                    answered = (await connection.head()).status == 200
                finally:
                    self._pool.give_back(upstream, connection)
        except (EngineError, TimeoutError):
            return b"# the engine gave no metrics\n"
        return b"".join(parts) if answered else b""

    def _upstream(self) -> Upstream:
        upstream = self._serving.upstream()
        if upstream is None:
            raise failures.not_serving(self._serving.health())
        return upstream

    async def _ask(self, upstream: Upstream, method: str, request: bytes) -> EngineConnection:
        """Send a request that can be sent again; returns with the head of its answer."""
        used = self._pool.take(upstream)
        if used is not None:
            try:
                return await _asked(used, method, request)
            except EngineLost:
                # The engine closes idle connections, perhaps in the moment in which we chose one, and
                # each one that it has streamed on, although it promises to keep it.
                if used.answered:
                    raise
        return await _asked(await self._pool.connect(upstream), method, request)

    async def _upload(
        self, request: web.BaseRequest, exchange: Exchange, upstream: Upstream, head: bytes, body: Body
    ) -> web.StreamResponse:
        """A body too large to be sent twice: on a connection that nobody has used before."""
        connection = await self._pool.connect(upstream)
        sending = asyncio.create_task(_send_body(connection, request.method, head, body), name="upload")
        try:
            return await self._hand_back(request, exchange, upstream, connection)
        finally:
            # An answer may come before the end of what it answers, a refusal above all.
            sending.cancel()
            await asyncio.wait((sending,))

    async def _hand_back(
        self, request: web.BaseRequest, exchange: Exchange, upstream: Upstream, connection: EngineConnection
    ) -> web.StreamResponse:
        try:
            head = await connection.head()
            outlet = exchange.outlet = await Outlet.open(
                request,
                status=head.status,
                reason=head.reason,
                headers=_end_to_end(head.headers),
                silence_s=self._limits.silence_s,
            )
            await outlet.pour_from(connection)
            return outlet.response
        finally:
            self._pool.give_back(upstream, connection)

    async def _failure(self, error: EngineError, upstream: Upstream, body: Body) -> Failure:
        if isinstance(error, EngineSilent):
            return (failures.body_late if body.waiting else failures.engine_silent)(self._limits.silence_s)
        try:
            async with asyncio.timeout(GATEWAY_EXPLAIN_S):
                sentence = await self._serving.engine_failure(upstream)
        except TimeoutError:
            sentence = "the engine closed the connection"
        log.warning("engine lost url=%s error=%r why=%s", upstream.url, error, sentence)
        return failures.engine_lost(sentence)


async def _asked(connection: EngineConnection, method: str, request: bytes) -> EngineConnection:
    try:
        connection.send(method, request)
        await connection.head()
    except BaseException:
        connection.close()
        raise
    return connection


async def _send_body(connection: EngineConnection, method: str, head: bytes, body: Body) -> None:
    try:
        await connection.upload(method, head, body.parts(), chunked=body.chunked)
    except Failure as failure:
        connection.fail(EngineLost(f"the upload broke off: {failure.message}"))


def _target(request: web.BaseRequest) -> str:
    """The path and query as the client wrote them.

    Always with a leading slash: appended to the engine's address, `@elsewhere/` would
    send the request, and the engine's key, elsewhere.
    """
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/") or request.method == "CONNECT":
        raise failures.bad_request("the request names no path of this API")
    return target


def _request_head(
    method: str, target: str, upstream: Upstream, headers: CIMultiDict[str], framing: dict[str, str]
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {upstream.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"{name}: {value}" for name, value in framing.items()]
    lines += [f"Authorization: Bearer {upstream.key}"]
    if _CONTROL.search("".join(lines)):
        # A line end among them would be a header of its own, or a second request.
        raise failures.bad_request("the request's path and headers may hold no control characters")
    try:
        return ("\r\n".join(lines) + "\r\n\r\n").encode()
    except UnicodeEncodeError:
        raise failures.bad_request("the request's path and headers must be UTF-8") from None
