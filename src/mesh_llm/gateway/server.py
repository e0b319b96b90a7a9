"""The API port: connections, who answers what, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from aiohttp import web

from mesh_llm.defaults import API_LISTEN, API_PORT, GATEWAY_STOP_S
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors, ports
from mesh_llm.gateway.access import HEALTH_PATHS, ApiAccess, is_known, key_of, may_manage
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.chat_page import ChatPage
from mesh_llm.gateway.client_connection import ClientServer, check_head
from mesh_llm.gateway.guest import Guest
from mesh_llm.gateway.guests import Guests
from mesh_llm.gateway.headers import OURS, SAFE
from mesh_llm.gateway.key_usage import KeyUsage
from mesh_llm.gateway.keys import Keys
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import BROKEN, CLIENT_GONE, CONTENT_TYPE, Exchange, FirstToken, Meters
from mesh_llm.gateway.proxy import Proxy
from mesh_llm.gateway.router_api import RouterApi
from mesh_llm.gateway.routes import route_of
from mesh_llm.gateway.share_page import is_share_page, share_page
from mesh_llm.gateway.shared_port import SharedPort
from mesh_llm.gateway.upstream import Serving
from mesh_llm.gateway.warm_prefixes import WarmPrefixes
from mesh_llm.loopback import is_loopback
from mesh_llm.tasks import cancelled
from mesh_llm.types import State

log = logging.getLogger(__name__)

_REFUSALS = (401, 403, 429)
"""Answers of ours that a person at the node may want to know of."""
_PREFLIGHT = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*",
    "Content-Type": "text/html",
}
"""What the engine says to a browser that asks whether a page may ask: to any path, loaded or not."""


@frozen
class GatewayConfig:
    listen: str = API_LISTEN
    port: int = API_PORT
    """0 takes any free one."""
    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys_file: Path | None = None
    """Keys with names."""
    key_usage_file: Path | None = None
    limits: Limits = field(default_factory=Limits)


class Gateway:
    """Answers API clients on one port from `start` until `stop`."""

    def __init__(self, config: GatewayConfig, serving: Serving, page: ChatPage | None = None) -> None:
        """`page`: what browsers find at its address; None for none."""
        self._config = config
        self._serving = serving
        self._page = page
        self.keys = Keys(config.keys_file)
        self.key_usage = KeyUsage(self.keys, config.key_usage_file)
        self._guard = ApiAccess(api_key=config.api_key, listen=config.listen, keys=self.keys)
        self._router = RouterApi(serving, config.limits, self.key_usage, is_ending=lambda: self._draining)
        self._shared: SharedPort | None = None
        self._meters = Meters()
        self._meters.watch_queues(serving.slot_queues)
        self.warm = WarmPrefixes()
        self._relay: Proxy | None = None
        self._guests: Guests | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.SockSite | None = None
        self._port = 0
        self._keeping: asyncio.Task[None] | None = None
        self._draining = False
        self._stopping = False
        self._under_way: set[asyncio.Task[object]] = set()

    @property
    def port(self) -> int:
        """The port that was taken; 0 before `start`."""
        return self._port

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the API."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._config.listen, self._config.listen)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http{'s' if self._config.tls_cert else ''}://{host}:{self._port}"

    async def start(self) -> None:
        config = self._config
        _check(config)
        context = None if config.tls_cert is None else ports.tls(config.tls_cert, config.tls_key)
        taken = await asyncio.to_thread(ports.bind, config.listen, config.port)
        self._port = taken.getsockname()[1]
        self._relay = Proxy(self._serving, config.limits, self.warm)
        self._guests = Guests(self._serving, config.limits, self._meters.count_guest, self.warm)
        # The time is spent in `stop` before the runner's turn comes; what is left then gets cut.
        self._runner = web.ServerRunner(
            ClientServer(partial(self._handle, self._guard), config.limits), shutdown_timeout=GATEWAY_STOP_S
        )
        await self._runner.setup()
        self._site = web.SockSite(self._runner, taken, ssl_context=context)
        await self._site.start()
        self._keeping = asyncio.create_task(self.key_usage.keep(), name="usage of keys")
        log.info("gateway listening url=%s", self.url)

    async def share(self, taken: socket.socket, context: ssl.SSLContext) -> None:
        """Answer on a second port, too, whose clients need a named key."""
        assert self._shared is None
        guard = ApiAccess(api_key=None, listen=self._config.listen, keys=self.keys, is_shared=True)
        self._shared = SharedPort(partial(self._handle, guard), self._config.limits)
        await self._shared.open(taken, context)

    async def unshare(self) -> None:
        """Close that port, and the connections to it."""
        if self._shared is not None:
            shared, self._shared = self._shared, None
            await shared.close()

    @property
    def shared_at(self) -> tuple[str, int] | None:
        """The address of the second port."""
        return self._shared.address if self._shared is not None else None

    async def serve_guest(self, link: socket.socket, guest: Guest) -> None:
        """Answer another node's gateway on `link`, for the engine here, until the connection ends."""
        if self._guests is None:
            link.close()
            return
        await self._guests.serve(link, guest)

    @property
    def active(self) -> int:
        """Requests under way, those of other nodes at the engine here included."""
        return len(self._all_under_way())

    def _all_under_way(self) -> set[asyncio.Task[object]]:
        return self._under_way | (self._guests.under_way if self._guests is not None else set())

    def on_wait(self, waited_s: float) -> None:
        """A request has waited for a slot of an engine here."""
        self._meters.on_wait(waited_s)

    def take_first_tokens_s(self) -> list[float]:
        """What clients waited for first tokens, since this was last asked."""
        return self._meters.take_first_tokens_s()

    def last_first_token(self) -> FirstToken | None:
        """What the last client that has got one waited for its first token."""
        return self._meters.last_first_token()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and give those under way `timeout_s` to finish."""
        self._draining = True
        await self._close_port()
        # Idle connections stay until `stop`: closing them here would cut off uploads as well.
        deadline = asyncio.get_running_loop().time() + timeout_s
        while under_way := self._all_under_way():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                log.warning("drain ended with open requests count=%d", len(under_way))
                return
            await asyncio.wait(under_way, timeout=left_s)

    async def stop(self) -> None:
        """End everything: requests still under way are told so, and their connections closed."""
        self._draining = self._stopping = True
        await self._close_port()
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=GATEWAY_STOP_S)
        await self.unshare()
        if self._guests is not None:
            await self._guests.close()
            self._guests = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if self._keeping is not None:
            await cancelled(self._keeping)
            self._keeping = None
            await self.key_usage.write()

    async def _close_port(self) -> None:
        if self._shared is not None:
            self._shared.stop_listening()
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def _handle(self, guard: ApiAccess, request: web.BaseRequest) -> web.StreamResponse:
        """The top of every request: whatever happens below, somebody is answered, counted and logged."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        exchange = self._meters.begin(request)
        exchange.headers = {**SAFE, **_page_header(guard, request)}
        status = 0
        try:
            response = await self._answer_or_fail(guard, request, exchange, task)
            status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            exchange.outcome = CLIENT_GONE
            raise
        finally:
            self.key_usage.end(exchange)
            self._meters.finish(exchange, status=status)

    async def _answer_or_fail(
        self, guard: ApiAccess, request: web.BaseRequest, exchange: Exchange, task: asyncio.Task[object]
    ) -> web.StreamResponse:
        try:
            return await self._answer(guard, request, exchange)
        except ApiError as failure:
            return await self._fail(request, exchange, failure)
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            # Either the client has left, or this is `stop`: then the client is still there to be told.
            if not self._stopping or request.transport is None:
                raise
            task.uncancel()
            return await self._fail(request, exchange, api_errors.leaving("this node is stopping"))
        except Exception:
            log.exception("request failed method=%s path=%r", exchange.method, exchange.path)
            return await self._fail(request, exchange, api_errors.internal())

    async def _fail(
        self, request: web.BaseRequest, exchange: Exchange, failure: ApiError
    ) -> web.StreamResponse:
        if failure.status in _REFUSALS:
            self._serving.remark("refused", f"A request was refused: {failure.message}")
        if exchange.answer_writer is not None:
            exchange.outcome = BROKEN
            self._serving.remark("broken", f"An answer broke off: {failure.message}")
            last_words = exchange.last_words
            words = failure.event(request.path) if last_words is None else last_words(failure)
            await exchange.answer_writer.break_off(words)
            return exchange.answer_writer.response
        return self._ours(request, exchange, failure.response(request.path))

    async def _answer(
        self, guard: ApiAccess, request: web.BaseRequest, exchange: Exchange
    ) -> web.StreamResponse:
        check_head(request)
        is_page = self._page is not None and self._page.has(request)
        guard.check(request, public=is_page or is_share_page(request))
        if is_share_page(request):
            return self._shown(exchange, share_page(request))
        key = key_of(request)
        if key is not None and _has_engine_work(request):
            self.key_usage.begin(key, exchange)
        assert self._relay is not None
        if self._page is not None and is_page:
            return self._shown(exchange, self._page.answer(request, self._waiting(request)))
        if request.method in ("GET", "HEAD"):
            if request.path in HEALTH_PATHS:
                return self._ours(request, exchange, self._health(request))
            if request.path == "/metrics":
                if key is not None and not key.manage:
                    # It names everybody who asks here.
                    raise api_errors.needs_manage("this")
                return self._ours(request, exchange, await self._metrics())
        if request.method == "OPTIONS" and request.path.startswith("/"):
            return self._ours(request, exchange, web.Response(body=b"", headers=_PREFLIGHT))
        if self._draining:
            raise api_errors.leaving("this node is stopping; open requests are being finished")
        if self._router.is_meant(request):
            return await self._router.answer(request, exchange, may_manage=may_manage(request))
        response = await self._relay.answer(request, exchange)
        if not response.prepared:
            response.headers.update(exchange.headers)
        return response

    def _health(self, request: web.BaseRequest) -> web.Response:
        health = self._serving.models()[0].health()
        told: dict[str, str | None] = {"status": "ok", "state": health.state.value}
        if is_known(request):
            told["model"] = health.model
        else:
            # Whoever has no key may know that the API is there, and no names of models or nodes.
            health = replace(health, reason="", model=None)
        if health.state is not State.SERVING:
            raise api_errors.not_serving(health)
        return web.json_response(told)

    def _waiting(self, request: web.BaseRequest) -> str | None:
        """What people are told who come while no model is served."""
        health, *others = (model.health() for model in self._serving.models())
        if any(each.state is State.SERVING for each in (health, *others)):
            return None
        reason = health.reason if is_known(request) else ""
        return f"This node is {health.state.value}{reason and f': {reason}'}."

    async def _metrics(self) -> web.Response:
        assert self._relay is not None
        engine = await self._relay.engine_metrics()
        text = self._meters.text() + self._serving.metrics(engine) + engine
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _ours(
        self, request: web.BaseRequest, exchange: Exchange, response: web.Response
    ) -> web.StreamResponse:
        """An answer that is not the engine's, with what the engine adds to each of its own."""
        response.headers.update({**OURS, **exchange.headers})
        if isinstance(response.body, bytes):
            exchange.answered(response.body)
        return response

    def _shown(self, exchange: Exchange, response: web.Response) -> web.Response:
        """A file of the page, whose policy is its own."""
        response.headers["Server"] = OURS["Server"]
        if isinstance(response.body, bytes):
            exchange.answered(response.body)
        return response


def _has_engine_work(request: web.BaseRequest) -> bool:
    with suppress(ApiError):
        route = route_of(request.method, request.path)
        return route.computes or route.tokenizes
    return False  # refused later on


def _page_header(guard: ApiAccess, request: web.BaseRequest) -> dict[str, str]:
    page = guard.page(request)
    return {} if page is None else {"Access-Control-Allow-Origin": page}


def _check(config: GatewayConfig) -> None:
    if config.api_key is not None and not config.api_key.strip():
        raise UsageError("the API key is empty", hint="leave --api-key out to serve this machine only")
    if config.api_key is None and not is_loopback(config.listen):
        raise UsageError(f"listening on {config.listen} needs --api-key", hint="127.0.0.1 needs none")
    if config.tls_key is not None and config.tls_cert is None:
        raise UsageError("--tls-key needs --tls-cert")
