"""llama-server's router API: load and unload models, and events when one is loaded or goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from mesh_llm.errors import MeshError, NotOwner, UsageError
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.access import key_of
from mesh_llm.gateway.answer_writer import AnswerWriter
from mesh_llm.gateway.headers import OURS
from mesh_llm.gateway.key_usage import KeyUsage
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.gateway.model_list import status_of
from mesh_llm.gateway.model_route import chosen
from mesh_llm.gateway.request_body import RequestBody
from mesh_llm.gateway.sse import comment, dump
from mesh_llm.gateway.upstream import ModelServing, Serving

LOAD, UNLOAD, EVENTS = "/models/load", "/models/unload", "/models/sse"
_PATHS = {("POST", LOAD), ("POST", UNLOAD), ("GET", EVENTS)}
ROUTER_LOOK_S = 0.25
"""Between two looks at the models, for those who watch them."""
ROUTER_WATCHERS = 64
"""That watch at once: each is a task that looks four times a second."""
_BODY_BYTES = 16 << 10
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **OURS}


class RouterApi:
    def __init__(
        self, serving: Serving, limits: Limits, usage: KeyUsage, *, is_ending: Callable[[], bool]
    ) -> None:
        """`is_ending`: whether whoever watches is to be let go."""
        self._serving = serving
        self._limits = limits
        self._usage = usage
        self._is_ending = is_ending
        self._watchers = 0

    @staticmethod
    def is_meant(request: web.BaseRequest) -> bool:
        return (request.method, request.path) in _PATHS

    async def answer(
        self, request: web.BaseRequest, exchange: Exchange, *, may_manage: bool
    ) -> web.StreamResponse:
        if request.path == EVENTS:
            return await self._events(request, exchange)
        limits = replace(self._limits, body_bytes=_BODY_BYTES)
        name = _name(await RequestBody.receive(request, exchange, limits))
        if not may_manage:
            self._check_asker(request, exchange, name)
        await self._manage(request.path, name)
        body = dump({"success": True})
        exchange.answered(body)
        return web.Response(body=body, content_type="application/json", headers={**OURS, **exchange.headers})

    def _check_asker(self, request: web.BaseRequest, exchange: Exchange, name: str) -> None:
        """Who may only ask may load what a question would load, at the price of one."""
        model = self._known(name)
        if request.path != LOAD or model is None or not model.details().on_demand:
            raise api_errors.forbidden("this API key may not load or unload models", code="may_not_manage")
        if (key := key_of(request)) is not None:
            self._usage.begin(key, exchange)

    def _known(self, name: str) -> ModelServing | None:
        models = self._serving.models()
        return chosen(models, name) if len(models) > 1 or name in models[0].names else None

    async def _manage(self, path: str, name: str) -> None:
        model = self._known(name)
        runs = model is not None and status_of(model)["value"] in ("loaded", "loading")
        if runs is (path == LOAD):
            word = "is already running" if runs else "is not running"
            raise api_errors.not_done(f"the model {name[:100]!r} {word}")
        known = model.names[0] if model is not None else name
        await managed(self._serving.load(known) if path == LOAD else self._serving.unload(known))

    # -- events --------------------------------------------------------------------------------

    async def _events(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        if self._watchers >= ROUTER_WATCHERS:
            raise api_errors.crowded()
        writer = exchange.answer_writer = await AnswerWriter.open(
            request,
            status=200,
            reason="OK",
            headers=CIMultiDict({**_STREAM, **exchange.headers}),
            silence_s=self._limits.silence_s,
        )
        writer.take(comment("mesh-llm models"))
        self._watchers += 1
        try:
            await self._watch(request, writer)
        finally:
            self._watchers -= 1
        await writer.finish()
        return writer.response

    async def _watch(self, request: web.BaseRequest, writer: AnswerWriter) -> None:
        loop = asyncio.get_running_loop()
        before, sent_s = self._seen(), loop.time()
        while not self._is_ending() and request.transport is not None:
            await asyncio.sleep(ROUTER_LOOK_S)
            now = self._seen()
            for event in _changes(before, now):
                writer.take(b"data: " + dump(event) + b"\n\n")
                sent_s = loop.time()
            before = now
            if loop.time() - sent_s >= self._limits.beat_s:
                writer.take(comment("mesh-llm models"))
                sent_s = loop.time()

    def _seen(self) -> dict[str, dict[str, Any]]:
        return {model.names[0]: _progress(model) for model in self._serving.models()}


async def let_go(serving: Serving, model: ModelServing, *, may_manage: bool) -> None:
    """A model on demand; one that is not loaded need not go."""
    if not may_manage:
        raise api_errors.needs_manage("unloading a model")
    if status_of(model)["value"] in ("loaded", "loading"):
        await managed(serving.unload(model.names[0]))


async def managed(work: Awaitable[None]) -> None:
    """What a node was asked to load or unload; its refusal is the client's."""
    try:
        await work
    except NotOwner as error:
        raise api_errors.forbidden(error.message, code="not_owner") from error
    except UsageError as error:
        raise api_errors.not_done(error.message) from error
    except MeshError as error:
        raise api_errors.not_done(error.message, status=409) from error


def _progress(model: ModelServing) -> dict[str, Any]:
    status = status_of(model)
    told = {"status": status["value"]}
    return {**told, "reason": status["reason"]} if status.get("reason") else told


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in before.keys() - now.keys():
        yield {"model": name, "event": "model_remove"}
    if now.keys() - before.keys():
        yield {"model": "*", "event": "models_reload"}
    for name, status in now.items():
        if before.get(name) != status:
            yield {"model": name, "event": "model_status", "data": status}


def _name(body: RequestBody) -> str:
    try:
        name = json.loads(body.start)["model"] if body.complete else None
    except (ValueError, LookupError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        raise api_errors.not_done('name the model: {"model": "NAME"}')
    return name
