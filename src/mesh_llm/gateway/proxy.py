"""Send a request on to an engine, and the engine's answer back; and to the next engine if that one dies."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from aiohttp import web
from multidict import CIMultiDict

from mesh_llm.defaults import GATEWAY_EXPLAIN_S, GATEWAY_REDACTED_LIMIT_BYTES
from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors, ollama, token_limit
from mesh_llm.gateway.access import key_of, may_manage
from mesh_llm.gateway.answer import Answer, EngineGaveUp, EngineRefused
from mesh_llm.gateway.api_errors import ApiError, is_ollama
from mesh_llm.gateway.connection_pool import ConnectionPool
from mesh_llm.gateway.delivery import Rewrite, deliver, redacted
from mesh_llm.gateway.dialects import ollama_request
from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.dialects.ollama import loaded
from mesh_llm.gateway.engine_choice import EngineChoice, EngineUntried, is_given_up, until_serving
from mesh_llm.gateway.engine_connection import EngineConnection, EngineError, EngineLost, EngineSilent
from mesh_llm.gateway.engine_errors import EngineRefusal, is_worth_reading
from mesh_llm.gateway.engine_request import EngineRequest, small
from mesh_llm.gateway.engine_series import together
from mesh_llm.gateway.headers import from_engine
from mesh_llm.gateway.http_framing import Head, MalformedAnswer
from mesh_llm.gateway.lanes import lane_of
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.gateway.model_list import MODELS_PATH, entry, found, is_list, model_asked_for
from mesh_llm.gateway.model_route import chosen, named
from mesh_llm.gateway.ollama_models import OllamaModels
from mesh_llm.gateway.replica_choice import ReplicaChoice
from mesh_llm.gateway.request_body import KeptBodies, RequestBody
from mesh_llm.gateway.resume_join import Diverged
from mesh_llm.gateway.router_api import let_go
from mesh_llm.gateway.routes import PLAIN, Route
from mesh_llm.gateway.slot_queue import QueueFull, SlotWaitExpired
from mesh_llm.gateway.sse import dump
from mesh_llm.gateway.text_request import TextRequest, read_document
from mesh_llm.gateway.upstream import ModelServing, Serving, SlotRequest, Upstream
from mesh_llm.gateway.warm_prefixes import WarmPrefixes, prompt_of

GATEWAY_DOUBT_S = 0.5
"""To hear of a lost worker after the engine answered 500: it says that to some wrong questions, too."""
GATEWAY_REFUSAL_BYTES = 64 << 10
"""Of an engine's words against a request, read to be said in another way; they are a sentence or two."""
GATEWAY_QUESTION_S = 20.0
"""For an engine to count or render a prompt, the longest one on the slowest machine."""
GATEWAY_LIST_S = 2.0
"""For an engine to tell of its model, in a list of all of them: one that is busy is listed without it."""
GATEWAY_PREFER_WAIT_S = 600.0
"""The longest that a client may ask to wait for the model: loading the largest takes minutes."""
GATEWAY_METRICS_S = 2.0
"""The engine answers between two batches; a scrape must not wait for a long one."""


log = logging.getLogger(__name__)

_COMPUTE_ERROR = 500
"""How the engine answers when a worker is lost, among other things."""
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*([0-9]{1,6})(?:$|[,;\s])", re.IGNORECASE)


@frozen
class _Request:
    """What a client sent, what is noted of it, and how engines are asked for it."""

    http: web.BaseRequest
    exchange: Exchange
    engine: EngineRequest
    model: ModelServing
    rewrite: Rewrite | None = None
    """How the client gets an answer that is no text, where that is not as the engine gives it."""

    def at(self, target: str) -> _Request:
        """Of another route of the engine's."""
        return replace(self, engine=replace(self.engine, target=target))


class Proxy:
    """The way to the engine and back, for all requests of one gateway."""

    def __init__(self, serving: Serving, limits: Limits, warm: WarmPrefixes) -> None:
        self._serving = serving
        self._choice = ReplicaChoice(warm)
        self._limits = limits
        self._kept = KeptBodies(limits.kept_bytes)
        self._pool = ConnectionPool(limits)
        self._ollama = OllamaModels(self._told)

    def close(self) -> None:
        self._choice.close()
        self._pool.close()

    async def answer(self, http: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        engine, models = EngineRequest.of(http), self._serving.models()
        if http.path in ollama.LIST_PATHS:
            return _own(await self._ollama.listed(http.path, models), exchange)
        if len(models) == 1:
            await _until_serving(http, models[0])
        limits = self._limits
        if len(models) > 1:
            # What names the model may stand at the end.
            limits = replace(limits, replay_bytes=limits.body_bytes)
        with self._kept.share() as keep:
            body = await RequestBody.receive(http, exchange, limits, keep=keep)
            try:
                if len(models) > 1 and is_list(http.method, http.path):
                    return await self._list(exchange, models)
                model = _model_of(http, body, models, read_bytes=self._limits.replay_bytes)
                if len(models) > 1 and model_asked_for(http.method, http.path) is not None:
                    _, told = await self._told(model, MODELS_PATH)
                    return _own(entry(model, told), exchange)
                request = _Request(http=http, exchange=exchange, engine=engine, model=model)
                response = await self._answer(request, body)
                if exchange.answer_writer is not None:
                    # Out of turn: the engine is done with it, however slowly its client reads.
                    await exchange.answer_writer.finish()
                return response
            except EngineSilent as error:
                late = api_errors.body_late if body.waiting else api_errors.engine_silent
                raise (body.failure or late(self._limits.silence_s)) from error

    async def _answer(self, request: _Request, body: RequestBody) -> web.StreamResponse:
        method, path = request.http.method, request.http.path
        if is_ollama(path):
            return await self._translated(request, body)
        generation = None
        if body.is_here(self._limits.replay_bytes):
            seed = request.model.details().seed
            generation = TextRequest.read(method, path, body.start, seed=seed)
        key = key_of(request.http)
        if key is not None and key.tokens_per_day is not None:
            token_limit.check(path, body, generation, read_bytes=self._limits.replay_bytes)
        if generation is not None:
            return await self._generate(request, generation)
        await _until_serving(request.http, request.model)
        if not body.complete:
            return await self._upload(request, body)
        if (model := model_asked_for(method, path)) is not None:
            return await self._model(request, model)
        return await self._pass_on(request, body)

    async def engine_metrics(self) -> bytes:
        """The engine's own series, or nothing where it has none to give in time."""
        upstream = self._serving.models()[0].upstream()
        if upstream is None:
            return b""
        urls = upstream.lanes.urls if upstream.lanes is not None else ()
        engines = [replace(upstream, url=url) for url in urls] or [upstream]
        question = small("GET", "/metrics")
        try:
            async with asyncio.timeout(GATEWAY_METRICS_S):
                told = await asyncio.gather(*(self._fetch(engine, question, b"") for engine in engines))
        except (EngineError, TimeoutError):
            return b"# the engine gave no metrics\n"
        return together([body for head, body in told if head.status == 200])

    async def _list(self, exchange: Exchange, models: Sequence[ModelServing]) -> web.Response:
        """All models: what the engine of each says, as far as there is one."""
        told = await asyncio.gather(*(self._told(model, MODELS_PATH) for model in models))
        listed = [entry(model, each) for model, (_, each) in zip(models, told, strict=True)]
        return _own({"object": "list", "data": listed}, exchange)

    def _redaction(self, http: web.BaseRequest) -> Rewrite:
        """Of the default one of several models, unless another one is named."""
        routes = len(self._serving.models()) > 1 and "model" not in http.query
        return partial(redacted, http.path, routes=routes)

    async def _told(
        self, model: ModelServing, target: str, document: Document | None = None
    ) -> tuple[int, bytes]:
        """Status and body of what its engine tells of itself, as far as there is one."""
        if (upstream := model.upstream()) is None:
            return 0, b""
        asked = b"" if document is None else dump(document)
        try:
            async with asyncio.timeout(GATEWAY_LIST_S):
                head, told = await self._fetch(upstream, small("POST" if asked else "GET", target), asked)
        except (EngineError, TimeoutError):
            return 0, b""
        return head.status, told if head.status == 200 else b""

    async def _model(self, request: _Request, name: str) -> web.Response:
        """One of the list that the engine gives; it has no route of its own for that."""
        exchange = request.exchange
        async with EngineChoice(request.model, limit_s=self._limits.resume_s) as attempts:
            while True:
                upstream = await attempts.next()
                exchange.served_by = _elsewhere(upstream)
                try:
                    async with asyncio.timeout(GATEWAY_QUESTION_S):
                        head, listed = await self._fetch(upstream, small("GET", MODELS_PATH), b"")
                    break
                except TimeoutError:
                    attempts.failed(upstream, EngineLost("the engine did not list its models"), told=False)
                except EngineSilent:
                    raise
                except EngineError as error:
                    attempts.failed(upstream, error, told=False)
                    exchange.resumed += 1
        if head.status != 200:
            raise api_errors.engine_lost("the engine did not report its models")
        model = found(name, listed)
        if model is None:
            raise api_errors.no_such_model(name)
        headers = _headers(head, upstream, exchange)
        headers.popall("Content-Length", None)
        body = dump(model)
        exchange.answered(body)
        return web.Response(body=body, headers=headers)

    async def _translated(self, request: _Request, body: RequestBody) -> web.StreamResponse:
        """A request of Ollama's API, which the engine is asked in its own words."""
        path = request.http.path
        body.require(self._limits.replay_bytes)
        document = read_document(body.start)
        if path == ollama.SHOW_PATH:
            return _own(await self._ollama.shown(request.model), request.exchange)
        stops = path not in ollama.EMBED_PATHS and ollama_request.is_stop(document)
        stays = stops and not request.model.details().on_demand
        if ignored := [*ollama_request.ignored(document), *(["keep_alive"] if stays else [])]:
            request.exchange.headers["x-mesh-llm-ignored"] = ", ".join(ignored)
        if stops:
            if not stays:
                await let_go(self._serving, request.model, may_manage=may_manage(request.http))
            return _own(loaded(path, document, goes=not stays), request.exchange)
        if path in ollama.EMBED_PATHS or ollama_request.is_load(document):
            await _until_serving(request.http, request.model)
        if path in ollama.EMBED_PATHS:
            body.start = dump(ollama.embedding_request(path, document))
            rewrite = partial(ollama.embedding_answer, path, document, time.monotonic())
            return await self._pass_on(replace(request, rewrite=rewrite).at("/v1/embeddings"), body)
        if ollama_request.is_load(document):
            return _own(loaded(path, document), request.exchange)
        generation = TextRequest.of_ollama(path, document, seed=request.model.details().seed)
        return await self._generate(request.at(generation.dialect.engine_path), generation)

    # -- text ------------------------------------------------------------------------------------

    async def _generate(self, request: _Request, generation: TextRequest) -> web.StreamResponse:
        answer = Answer(request.http, generation, request.exchange, self._limits)
        request.exchange.last_words = answer.last_words
        try:
            with answer.beating():
                await _until_serving(request.http, request.model, on_wait=answer.wait)
                refusal = await self._complete(request, answer, generation.body)
            return await _finished(answer) if refusal is None else refusal
        finally:
            await answer.close()

    async def _complete(self, request: _Request, answer: Answer, body: Document) -> web.StreamResponse | None:
        """Ask engines until nothing is missing; returns what one says instead where it does not mean to."""
        exchange = request.exchange
        async with await self._attempts(request.model, body) as attempts:
            while not answer.is_whole:
                answer.doing = "waiting for the next engine"
                upstream = await attempts.next()
                if attempts.count:
                    await self._resume(answer, exchange, attempts, upstream)
                before = exchange.events
                try:
                    refusal = await self._attempt(request, upstream, answer, left_s=attempts.left_s)
                    if refusal is not None:
                        return refusal
                except EngineGaveUp as error:
                    if not await is_given_up(request.model, upstream, within_s=GATEWAY_EXPLAIN_S):
                        return answer.refuse(error.event)
                    exchange.lost()
                    attempts.failed(upstream, error, told=exchange.events > before)
                except Diverged as error:
                    raise api_errors.not_resumed(str(error)) from error
                except EngineSilent:
                    raise
                except EngineError as error:
                    if exchange.answer_writer is not None and answer.answer_writer is None:
                        # Half of a refusal is with the client: there is no second head after that.
                        raise api_errors.engine_lost(str(error)) from error
                    if not answer.can_end():
                        exchange.lost()
                        attempts.failed(upstream, error, told=exchange.events > before)
        return None

    async def _attempts(self, model: ModelServing, body: Document) -> EngineChoice:
        """Engines for a request; the first one with regard to its prompt, where there are several."""
        several = len(model.upstreams()) > 1
        picker = await self._choice.picker(model, prompt_of(body)) if several else None
        return EngineChoice(model, limit_s=self._limits.resume_s, picker=picker)

    async def _resume(
        self, answer: Answer, exchange: Exchange, attempts: EngineChoice, upstream: Upstream
    ) -> None:
        exchange.resumed += 1
        why = await attempts.why_in_short()
        where = upstream.served_by or upstream.url
        log.warning("request resumed elsewhere events=%d node=%s cause=%s", exchange.events, where, why)
        answer.remark(f"resumed {exchange.resumed}, served by {where}: {why}")
        self._serving.remark("resumed", f"An answer continues with the engine of {where}: {why}")

    async def _attempt(
        self, request: _Request, upstream: Upstream, answer: Answer, *, left_s: float | None
    ) -> web.StreamResponse | None:
        """Let one engine answer, or go on; returns what it says instead where it does not mean to.

        `left_s`: for it to begin. An engine that computes is waited for.
        """

        async def count(target: str, document: Document | None) -> Document:
            return await self._question(upstream, target, document)

        exchange = request.exchange
        exchange.engine = exchange.engine if answer.has_begun else upstream.url
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                documents = await answer.next_requests(count, predict=upstream.predict)
        except TimeoutError:
            raise EngineUntried("the engine did not answer the gateway's own requests in time") from None
        if left_s is not None:
            left_s = max(0.0, left_s - (time.monotonic() - began_s))
        turn = request.engine.turn(resumed=answer.has_begun, within_s=left_s)
        asked = [request.engine.with_body(upstream, dump(document)) for document in documents]
        async with self._asked(request, upstream, turn, *asked) as connection:
            head = await connection.head()
            if head.status != 200 or not head.is_stream:
                return await self._refusal(request, upstream, connection, answer)
            await answer.open(_headers(head, upstream, exchange))
            if answer.answer_writer is not None:
                await answer.answer_writer.pour_from(connection, answer.take)
            else:
                await connection.pour(answer.take)
            if not answer.check_end():
                raise EngineLost("the answer ended too early")
            return None

    async def _refusal(
        self, request: _Request, upstream: Upstream, connection: EngineConnection, answer: Answer
    ) -> web.StreamResponse:
        if answer.answer_writer is not None or answer.has_begun:
            head = await connection.head()
            refusal = await _refusal_in(request.http, head, connection)
            if not answer.has_begun and 400 <= head.status < 500:
                # The stream was opened while the model was loaded: its next event is the error.
                raise await _error_in(head, connection, refusal)
            if refusal is not None and refusal.is_mistake:
                # It would say so again: it lacks what the first one had, a projector for images.
                raise api_errors.not_resumed(f"the next engine cannot go on: {refusal.message}")
            await self._check_failure(head, request.model, upstream)
            answer.cannot_continue = answer.cannot_continue or head.status in (400, 422)
            raise EngineLost(f"the next engine answered {head.status}")
        return await self._hand_back(request, upstream, connection, request.engine.route)

    async def _check_failure(self, head: Head, model: ModelServing, upstream: Upstream) -> None:
        """A failure of an engine that the node gives up is none of the request's."""
        if head.status != _COMPUTE_ERROR:
            return
        if await is_given_up(model, upstream, within_s=GATEWAY_DOUBT_S):
            raise EngineLost(f"the engine answered {head.status} while it was failing")

    async def _question(self, upstream: Upstream, target: str, document: Document | None) -> Document:
        """Something small that the engine knows."""
        engine_request = small("GET" if document is None else "POST", target)
        asked = b"" if document is None else dump(document)
        try:
            async with asyncio.timeout(GATEWAY_QUESTION_S):
                head, body = await self._fetch(upstream, engine_request, asked)
            answer: Any = json.loads(body) if head.status == 200 else None
        except TimeoutError:
            raise EngineLost(f"the engine did not answer {target}") from None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineRefused(f"the engine does not answer {target}")
        return answer

    # -- anything else ---------------------------------------------------------------------------

    async def _pass_on(self, request: _Request, body: RequestBody) -> web.StreamResponse:
        """As it came; to another engine as long as the client has heard nothing."""
        exchange, engine = request.exchange, request.engine
        async with await self._attempts(request.model, {}) as attempts:
            while True:
                upstream = await attempts.next()
                turn = engine.turn(within_s=attempts.left_s)
                asked = engine.head(upstream, body.headers()) + body.start
                try:
                    async with self._asked(request, upstream, turn, asked) as connection:
                        return await self._hand_back(request, upstream, connection, engine.route)
                except EngineSilent:
                    raise
                except EngineError as error:
                    attempts.failed(upstream, error, told=False)
                    if exchange.answer_writer is not None:
                        raise api_errors.engine_lost(await attempts.why()) from error
                    exchange.resumed += 1

    async def _upload(self, request: _Request, body: RequestBody) -> web.StreamResponse:
        """A body too large to be sent twice: on a connection that nobody has used before."""
        async with EngineChoice(request.model, limit_s=0.0) as attempts:
            # Asked again: the body may have taken its time, and the engine may be another one by now.
            upstream = await attempts.next()
            head = request.engine.head(upstream, body.headers())
            turn = request.engine.turn()
            request.exchange.served_by = _elsewhere(upstream)
            try:
                async with self._in_turn(upstream, turn):
                    connection = await self._pool.connect(upstream, turn)
                    sending = asyncio.create_task(
                        _send_body(connection, request.engine.method, head, body), name="upload"
                    )
                    try:
                        return await self._hand_back(request, upstream, connection)
                    finally:
                        # An answer may come before the end of what it answers, a refusal above all.
                        sending.cancel()
                        await asyncio.wait((sending,))
                        self._pool.give_back(upstream, connection)
            except EngineSilent:
                raise
            except EngineError as error:
                if body.failure is not None:
                    raise body.failure from error
                attempts.failed(upstream, error, told=False)
                raise api_errors.engine_lost(await attempts.why()) from error

    async def _hand_back(
        self, request: _Request, upstream: Upstream, connection: EngineConnection, route: Route = PLAIN
    ) -> web.StreamResponse:
        """`route`: of a request that can be sent again."""
        exchange = request.exchange
        head = await connection.head()
        refusal = await _refusal_in(request.http, head, connection)
        if route.computes and not (refusal is not None and refusal.is_mistake):
            await self._check_failure(head, request.model, upstream)
        if refusal is not None:
            return _told(refusal, head, exchange, _headers(head, upstream, exchange))
        return await deliver(
            request.http,
            exchange,
            connection,
            headers=_headers(head, upstream, exchange),
            rewrite=self._redaction(request.http) if route.redacted else request.rewrite,
            silence_s=self._limits.silence_s,
        )

    # -- connections -----------------------------------------------------------------------------

    async def _fetch(
        self, upstream: Upstream, engine_request: EngineRequest, body: bytes
    ) -> tuple[Head, bytes]:
        """Something small, out of turn; the engine may be a stranger's, and send without end."""
        parts: list[bytes] = []
        size = 0

        def take(part: bytes) -> None:
            nonlocal size
            size += len(part)
            if size > GATEWAY_REDACTED_LIMIT_BYTES:
                raise MalformedAnswer("the answer is too long")
            parts.append(part)

        request = engine_request.with_body(upstream, body) if body else engine_request.head(upstream, {})
        connection = await self._pool.ask(upstream, engine_request.method, request)
        try:
            await connection.pour(take)
            return await connection.head(), b"".join(parts)
        finally:
            self._pool.give_back(upstream, connection)

    @asynccontextmanager
    async def _asked(
        self, request: _Request, upstream: Upstream, turn: SlotRequest | None, *parts: bytes
    ) -> AsyncIterator[EngineConnection]:
        """Send a request that can be sent again, in its turn; the head of its answer has come.

        Of several requests, only the last one's answer matters.
        """
        method = request.engine.method
        request.exchange.served_by = _elsewhere(upstream)
        async with self._in_turn(upstream, turn):
            if turn is not None and upstream not in request.model.upstreams():
                raise EngineUntried("the engine was replaced while the request waited for a slot")
            with lane_of(upstream, parts[-1], computes=turn is not None) as engine:
                for part in parts[:-1]:
                    connection = await self._pool.ask(engine, method, part, turn)
                    try:
                        await connection.pour(lambda _: None)
                    finally:
                        self._pool.give_back(engine, connection)
                connection = await self._pool.ask(engine, method, parts[-1], turn)
                try:
                    yield connection
                finally:
                    self._pool.give_back(engine, connection)

    @asynccontextmanager
    async def _in_turn(self, upstream: Upstream, turn: SlotRequest | None) -> AsyncIterator[None]:
        """At the engine of this node; those elsewhere see to it themselves."""
        slot_queue = self._serving.slot_queue(upstream) if upstream.connect is None else None
        if turn is None or slot_queue is None:
            yield
            return
        try:
            async with slot_queue.take(
                turn.client, name=turn.name, resumed=turn.resumed, within_s=turn.within_s
            ):
                yield
        except QueueFull as refused:
            raise api_errors.busy(refused.retry_after_s) from None
        except SlotWaitExpired as late:
            if turn.within_s is not None:
                raise EngineUntried(str(late)) from None
            raise api_errors.queue_late(late.waited_s) from None


def _model_of(
    http: web.BaseRequest, body: RequestBody, models: Sequence[ModelServing], *, read_bytes: int
) -> ModelServing:
    """The model that a request is for; where there are several, only its body tells.

    `read_bytes`: of a larger one not all is read.
    """
    if len(models) == 1:
        return models[0]
    is_here = body.is_here(read_bytes)
    name = named(http.method, http.path, http.query, body.start, is_read=is_here)
    if name is None and not body.complete:
        raise api_errors.bodies_full()
    model = chosen(models, name)
    if model is None:
        raise api_errors.no_such_model(str(name), [each.names[0] for each in models])
    return model


async def _until_serving(
    http: web.BaseRequest, model: ModelServing, on_wait: Callable[[str], Awaitable[None]] | None = None
) -> None:
    """A client that prefers to wait for the model may do so."""
    asked = _WAIT.search(", ".join(http.headers.getall("Prefer", ())))
    patience_s = min(float(asked[1]), GATEWAY_PREFER_WAIT_S) if asked else None
    # Whoever only looks has nothing loaded.
    await until_serving(model, patience_s=patience_s, loads=http.method == "POST", on_wait=on_wait)


async def _finished(answer: Answer) -> web.StreamResponse:
    try:
        return await answer.finish()
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise api_errors.engine_lost("the engine's answer is malformed") from error


async def _send_body(connection: EngineConnection, method: str, head: bytes, body: RequestBody) -> None:
    try:
        await connection.upload(method, head, body.parts(), chunked=body.chunked)
    except ApiError as failure:
        connection.fail(EngineLost(f"the upload was cut off: {failure.message}"))


async def _refusal_in(
    request: web.BaseRequest, head: Head, connection: EngineConnection
) -> EngineRefusal | None:
    """What the engine says against a request, where it may have to be said in another way."""
    length = head.headers.get("Content-Length", "")
    is_short = length.isdecimal() and int(length) <= GATEWAY_REFUSAL_BYTES
    is_plain = is_short and "Content-Encoding" not in head.headers and request.method != "HEAD"
    if not is_plain or not is_worth_reading(request.path, head.status):
        return None
    parts: list[bytes] = []
    await connection.pour(parts.append)
    return EngineRefusal.read(request.path, head.status, b"".join(parts))


async def _error_in(head: Head, connection: EngineConnection, refusal: EngineRefusal | None) -> ApiError:
    """What the engine says against a request, for a client that has a stream already."""
    if refusal is not None:
        return api_errors.bad_request(refusal.message, status=refusal.status)
    parts: list[bytes] = []
    length = head.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) <= GATEWAY_REFUSAL_BYTES:
        await connection.pour(parts.append)
    try:
        error = json.loads(b"".join(parts))["error"]
        return api_errors.engine_gave_up({**error, "code": head.status})
    except (ValueError, LookupError, TypeError):
        return api_errors.bad_request(f"the engine answered {head.status}", status=head.status)


def _told(refusal: EngineRefusal, head: Head, exchange: Exchange, headers: CIMultiDict[str]) -> web.Response:
    headers.popall("Content-Length", None)
    if refusal.is_reworded:
        headers["Content-Type"] = "application/json; charset=utf-8"
    exchange.answered(refusal.body)
    reason = head.reason if refusal.status == head.status else None
    return web.Response(status=refusal.status, reason=reason, body=refusal.body, headers=headers)


def _own(document: Document, exchange: Exchange) -> web.Response:
    body = dump(document)
    exchange.answered(body)
    return web.Response(body=body, content_type="application/json", headers=exchange.headers)


def _elsewhere(upstream: Upstream) -> str:
    return upstream.served_by if upstream.connect is not None else ""


def _headers(head: Head, upstream: Upstream, exchange: Exchange) -> CIMultiDict[str]:
    headers = from_engine(head.headers)
    headers.update(exchange.headers)
    if upstream.served_by:
        headers["x-mesh-llm-served-by"] = quote(upstream.served_by, safe=" ")
    if exchange.resumed:
        headers["x-mesh-llm-resumed"] = str(exchange.resumed)
    return headers
