"""An engine's answer on its way to the client, as it is or without what is nobody's business."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.answer_writer import AnswerWriter
from mesh_llm.gateway.engine_connection import EngineConnection, EngineGarbled
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.gateway.sse import dump
from mesh_llm.gateway.token_counts import tokens_in

GATEWAY_REWRITTEN_BYTES = 64 << 20
"""Of an answer that is read here before it is passed on: 2,000 embeddings of 1,000 numbers each."""

Rewrite = Callable[[bytes], bytes]
"""A whole answer of the engine's as the client gets it. Raises `ValueError` where it makes no sense."""

_ROUTER = {"role": "router", "models_autoload": True}
"""What llama-server says where it serves several models: its page offers them then."""


def redacted(path: str, body: bytes, *, routes: bool = False) -> bytes:
    """The answer to `path` as anybody may read it. Raises `ValueError` where it makes no sense.

    `routes`: it is of the default one of several models.
    """
    document = json.loads(body)
    match path:
        case "/props" if isinstance(document, dict):
            if "ui" in document:
                # The gateway has the page; an engine without one has its model hidden there.
                document["ui"] = True
            if "model_path" in document:
                document["model_path"] = document.get("model_alias") or ""
            document |= _ROUTER if routes else {}
        case "/slots" if isinstance(document, list):
            # With its debug option an engine tells these.
            document = [_without(slot, "prompt", "generated") for slot in document]
        case "/lora-adapters" if isinstance(document, list):
            document = [_by_file_name(adapter) for adapter in document]
        case _:
            raise ValueError(f"this is not an answer to {path}")
    return dump(document)


def _without(document: Any, *names: str) -> Any:
    if not isinstance(document, dict):
        return {}
    return {name: value for name, value in document.items() if name not in names}


def _by_file_name(adapter: Any) -> Any:
    told = _without(adapter)
    if "path" in told:
        told["path"] = PurePath(str(told["path"])).name
    return told


async def deliver(
    request: web.BaseRequest,
    exchange: Exchange,
    connection: EngineConnection,
    *,
    headers: CIMultiDict[str],
    rewrite: Rewrite | None,
    silence_s: float,
) -> web.StreamResponse:
    """Returns when the engine has sent all of it; the client's end is left to `exchange.outlet.finish`."""
    head = await connection.head()
    if rewrite is not None and head.status == 200 and request.method != "HEAD":
        return await _rewritten(rewrite, exchange, connection, headers)
    answer_writer = exchange.answer_writer = await AnswerWriter.open(
        request,
        status=head.status,
        reason=head.reason,
        headers=headers,
        silence_s=silence_s,
        body=connection.take_short(),
    )
    try:
        await answer_writer.pour_from(connection)
    finally:
        if exchange.key:
            _count(exchange, answer_writer)
    return answer_writer.response


def _count(exchange: Exchange, answer_writer: AnswerWriter) -> None:
    """An answer that passes as it is tells its tokens where it begins or ends."""
    exchange.prompt_total, answer = tokens_in(answer_writer.ends)
    streams = answer_writer.response.headers.get("Content-Type", "").startswith("text/event-stream")
    exchange.completion_tokens = answer_writer.payloads if answer is None and streams else answer


async def _rewritten(
    rewrite: Rewrite, exchange: Exchange, connection: EngineConnection, headers: CIMultiDict[str]
) -> web.Response:
    whole = bytearray()

    def take(payload: bytes) -> None:
        whole.extend(payload)
        if len(whole) > GATEWAY_REWRITTEN_BYTES:
            raise EngineGarbled("the answer is too long")

    try:
        await connection.pour(take)
    except EngineGarbled as error:
        if len(whole) <= GATEWAY_REWRITTEN_BYTES:
            raise
        # Another engine's would be as long.
        limit = f"{GATEWAY_REWRITTEN_BYTES >> 20} MiB"
        raise api_errors.engine_lost(f"the engine's answer is longer than {limit}") from error
    try:
        body = rewrite(bytes(whole))
    except (ValueError, RecursionError) as error:
        raise EngineGarbled("the answer is malformed") from error
    for name in ("Content-Length", "Content-Encoding", "Content-Type"):
        headers.popall(name, None)
    headers["Content-Type"] = "application/json; charset=utf-8"
    exchange.answered(body)
    if exchange.key:
        exchange.prompt_total, exchange.completion_tokens = tokens_in((bytes(whole),))
    return web.Response(body=body, headers=headers)
