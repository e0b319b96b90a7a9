"""Requests of other nodes' gateways, for the engine here.

They are read, bounded and queued as those of this node's own clients are. What they ask is not
rewritten and not asked again elsewhere: the gateway they come from does both, and takes a connection
that ends early for a lost engine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from aiohttp import web

from mesh_llm.defaults import GATEWAY_STOP_S, GUESTS_LIMIT
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.client_connection import ClientConnection, ClientServer, check_head
from mesh_llm.gateway.connection_pool import ConnectionPool
from mesh_llm.gateway.delivery import deliver, redacted
from mesh_llm.gateway.engine_connection import EngineError, EngineLost
from mesh_llm.gateway.engine_request import EngineRequest
from mesh_llm.gateway.guest import Guest
from mesh_llm.gateway.headers import from_engine
from mesh_llm.gateway.lanes import lane_of
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.gateway.request_body import Keep, RequestBody
from mesh_llm.gateway.routes import Route
from mesh_llm.gateway.slot_queue import QueueFull, SlotQueue, SlotWaitExpired
from mesh_llm.gateway.upstream import Serving
from mesh_llm.gateway.warm_prefixes import WarmPrefixes, read_prompt

GUEST_IDLE_S = 15.0
"""For another node's gateway to send a request: it asks for a connection when it has one, and keeps one
for GATEWAY_ENGINE_IDLE_S."""
GUEST_BODY_SILENCE_S = 30.0
"""For more of its body: that gateway has most of it, or passes it on as it comes."""
GUEST_BODY_S = 300.0
"""For all of it: the longest body over a slow line."""
GUEST_BODY_LIMIT_BYTES = 64 << 20
"""Of one request, kept until its turn has come: a dozen photographs."""
GUEST_TOKENIZE_LIMIT_BYTES = 16 << 20
"""Of one whose tokens are counted: some millions of them, or a few images."""
GUEST_TOKENIZES = 1
"""Of these at once: each takes a processor from whoever computes."""
GUEST_KEPT_BYTES = 256 << 20
GUEST_KEPT_PER_ACCOUNT_BYTES = 128 << 20
"""Of all of them, and of one node's or one token's: half, so that nobody takes all the room."""
GUEST_STUCK_S = 120.0
"""Without reading, before its slot is somebody else's: its gateway takes thousands of tokens ahead."""


log = logging.getLogger(__name__)

_BROKEN = "broken"


class Guests:
    def __init__(
        self, serving: Serving, limits: Limits, count: Callable[[str], None], warm: WarmPrefixes
    ) -> None:
        """`count` is told how each request ended."""
        self._warm = warm
        self._serving = serving
        self._tokenizing = SlotQueue(GUEST_TOKENIZES)
        self._count = count
        self._pool = ConnectionPool(limits)
        self._limits = replace(
            limits,
            connections=GUESTS_LIMIT,
            idle_s=GUEST_IDLE_S,
            silence_s=min(limits.silence_s, GUEST_BODY_SILENCE_S),
            body_bytes=min(limits.body_bytes, GUEST_BODY_LIMIT_BYTES),
            replay_bytes=min(limits.body_bytes, GUEST_BODY_LIMIT_BYTES),
        )
        self._short = replace(
            self._limits, body_bytes=min(self._limits.body_bytes, GUEST_TOKENIZE_LIMIT_BYTES)
        )
        """For what is tokenized outside of the engine's slots."""
        self._server = ClientServer(self._handle, self._limits)
        self._kept: Counter[str] = Counter()
        """Bytes of bodies, by account."""
        self.under_way: set[asyncio.Task[object]] = set()

    async def serve(self, link: socket.socket, guest: Guest) -> None:
        """Answer on `link`, whose other end is the guest's, from now on and until it closes."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._server.connection(guest), sock=link)

    async def close(self) -> None:
        for task in self.under_way:
            task.cancel()
        self._server.pre_shutdown()
        await self._server.shutdown(GATEWAY_STOP_S)
        self._pool.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The top of every request: it gets an answer, or its connection ends."""
        task = asyncio.current_task()
        assert task is not None
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        exchange = Exchange(method=request.method, path=request.path)
        status = _BROKEN
        try:
            response = await self._answer_or_fail(request, exchange)
            status = str(response.status)
            return response
        finally:
            self._count(status)

    async def _answer_or_fail(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        assert isinstance(request.protocol, ClientConnection)
        guest = request.protocol.guest
        assert guest is not None
        try:
            return await self._answer(request, exchange, guest)
        except ApiError as failure:
            if exchange.answer_writer is None:
                return failure.response()
        except EngineError as error:
            log.info("no answer for a guest epoch=%d error=%r", guest.epoch, error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("request of a guest failed method=%s path=%r", exchange.method, exchange.path)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer was cut off")

    async def _answer(self, request: web.BaseRequest, exchange: Exchange, guest: Guest) -> web.StreamResponse:
        check_head(request)
        # What has to be translated was, by the guest.
        engine_request = EngineRequest.of(request, translated=False)
        with self._keeping(guest) as keep:
            # All of it before its turn: what does not come holds nobody up.
            body = await self._receive(request, exchange, engine_request.route, keep)
            try:
                async with self._turn(engine_request.route, guest):
                    response = await self._ask(request, exchange, guest, engine_request, body)
            except QueueFull as refused:
                raise api_errors.busy(refused.retry_after_s) from None
            except SlotWaitExpired as late:
                raise api_errors.queue_late(late.waited_s) from None
        if exchange.answer_writer is not None:
            await exchange.answer_writer.finish()
        return response

    async def _receive(
        self, request: web.BaseRequest, exchange: Exchange, route: Route, keep: Keep
    ) -> RequestBody:
        limits = self._short if route.tokenizes else self._limits
        receiving = RequestBody.receive(request, exchange, limits, keep=keep)
        if request.content.is_eof():
            # It came along with the head.
            return await receiving
        try:
            async with asyncio.timeout(GUEST_BODY_S):
                return await receiving
        except TimeoutError:
            raise api_errors.body_late(GUEST_BODY_S) from None

    @contextmanager
    def _keeping(self, guest: Guest) -> Iterator[Keep]:
        """Within the block, count bytes that are kept; raises the refusal where there is no more room."""
        account, kept = guest.account, 0

        def keep(size: int) -> bool:
            nonlocal kept
            kept += size
            self._kept[account] += size
            if self._kept[account] > GUEST_KEPT_PER_ACCOUNT_BYTES or self._kept.total() > GUEST_KEPT_BYTES:
                slot_queue = self._slot_queue(guest)
                raise api_errors.busy(slot_queue.retry_after_s if slot_queue is not None else 1)
            return True

        try:
            yield keep
        finally:
            self._kept[account] -= kept
            if not self._kept[account]:
                del self._kept[account]

    def _slot_queue(self, guest: Guest) -> SlotQueue | None:
        upstream = self._serving.engine(guest.epoch)
        return self._serving.slot_queue(upstream) if upstream is not None else None

    def _turn(self, route: Route, guest: Guest) -> AbstractAsyncContextManager[None]:
        """By what is asked for, whatever the guest says about it."""
        slot_queue = self._tokenizing if route.tokenizes else None
        if route.computes:
            slot_queue = self._slot_queue(guest)
        if slot_queue is None:
            return nullcontext()
        return slot_queue.take(
            guest.client,
            account=guest.account,
            name=guest.name,
            resumed=guest.resumed,
            within_s=guest.within_s,
        )

    async def _ask(
        self,
        request: web.BaseRequest,
        exchange: Exchange,
        guest: Guest,
        engine_request: EngineRequest,
        body: RequestBody,
    ) -> web.StreamResponse:
        # Only now: it may have ended while the request waited.
        upstream = self._serving.engine(guest.epoch)
        if upstream is None:
            raise EngineLost("the engine of that plan has ended")
        several = any(len(model.upstreams()) > 1 for model in self._serving.models())
        if several and engine_request.route.computes:
            self._warm.note(upstream.url, read_prompt(body.start))
        asked = engine_request.head(upstream, body.headers()) + body.start
        with lane_of(upstream, body.start, computes=engine_request.route.computes) as engine:
            connection = await self._pool.ask(engine, request.method, asked)
            try:
                return await deliver(
                    request,
                    exchange,
                    connection,
                    headers=from_engine((await connection.head()).headers),
                    rewrite=partial(redacted, request.path) if engine_request.route.redacted else None,
                    silence_s=GUEST_STUCK_S,
                )
            finally:
                self._pool.give_back(engine, connection)
