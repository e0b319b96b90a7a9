"""`/api/…`: what the page and `mesh-llm status`, `stop`, `invite` and others call on the running node."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from mesh_llm.agents.config_files import as_typed
from mesh_llm.agents.snippets import snippets
from mesh_llm.console import qr_code
from mesh_llm.console.event_feed import BEAT, Crowded, Feed
from mesh_llm.defaults import CONSOLE_BODY_LIMIT_BYTES
from mesh_llm.errors import MeshError, UsageError, of_system
from mesh_llm.frozen import frozen
from mesh_llm.types import Role

log = logging.getLogger(__name__)

_HIGHEST_LIFETIME_S = 10 * 366 * 86400.0
_HIGHEST_USES = 1_000_000
_WITH_BODY = (
    *("plan", "invite", "revoke", "promote", "measure", "qr", "pair", "pair-answer"),
    *("load-model", "unload-model", "use-model", "add-key", "revoke-key"),
    *("share", "stop-sharing"),
)


Document = dict[str, Any]


@frozen
class Managed:
    """What a node can be told and asked to do, by its page and its command line."""

    status: Callable[[], Awaitable[Document]]
    stop: Callable[[bool], None]
    """Told whether to leave the mesh, too."""
    unload: Callable[[], None]
    load: Callable[[], None]
    pause: Callable[[], Document]
    resume: Callable[[], Document]
    plan: Callable[[Document], Awaitable[Document]]
    """What `mesh-llm plan` shows of a running node's mesh."""
    snapshot: Callable[[], Document]
    """What every node brings, for verbs that ask whether something would fit."""
    network: Callable[[], Document]
    """This node's addresses and the way to each member, for `mesh-llm doctor`."""
    invite: Callable[[Role, float | None, int | None], Document]
    promote: Callable[[str], Document]
    invites: Callable[[], Document]
    revoke: Callable[[str], Document]
    pair: Callable[[Document], Awaitable[Document]]
    """Let a machine of the local network in by a code: open for ten minutes."""
    pairing: Callable[[], Document]
    answer_pairing: Callable[[Document], Document]
    end_pairing: Callable[[], Awaitable[Document]]
    load_model: Callable[[Document], Awaitable[Document]]
    unload_model: Callable[[Document], Document]
    use_model: Callable[[Document], Document]
    """Make it the default one."""
    keys: Callable[[], Document]
    """API keys with names, and what was asked with each."""
    add_key: Callable[[Document], Document]
    revoke_key: Callable[[Document], Document]
    share: Callable[[Document], Awaitable[Document]]
    """A guest's key, and the address on the local network that takes it to the chat."""
    stop_sharing: Callable[[Document], Awaitable[Document]]
    measure: Callable[[Document], Awaitable[Document]]
    """A link to another member, for `mesh-llm bench transport`."""


Answer = Callable[[Document], Awaitable[Document] | Document]
"""To the body of a request."""


def management_app(node: Managed, feed: Feed) -> web.Application:
    """All of them, for whoever may open the socket."""
    app = web.Application(client_max_size=CONSOLE_BODY_LIMIT_BYTES)
    add_management(app, node, feed)
    return app


def add_management(app: web.Application, node: Managed, feed: Feed) -> None:
    def stop(_: Document) -> Document:
        node.stop(False)
        return {"stopping": True, "pid": os.getpid(), "parent_pid": os.getppid()}

    def leave(_: Document) -> Document:
        node.stop(True)
        return {"leaving": True, "pid": os.getpid()}

    def unload(_: Document) -> Document:
        node.unload()
        return {"unloading": True}

    def load(_: Document) -> Document:
        node.load()
        return {"loading": True}

    async def agents(_: Document) -> Document:
        return {"agents": _agents(await node.status())}

    async def get_events(request: web.Request) -> web.StreamResponse:
        return await _events(request, feed)

    gets: dict[str, Answer] = {
        "status": lambda _: node.status(),
        "plan": node.plan,
        "snapshot": lambda _: node.snapshot(),
        "network": lambda _: node.network(),
        "invites": lambda _: node.invites(),
        "pair": lambda _: node.pairing(),
        "agents": agents,
        "keys": lambda _: node.keys(),
    }
    posts: dict[str, Answer] = {
        "plan": node.plan,
        "invite": lambda body: node.invite(*_asked_invite(body)),
        "revoke": lambda body: node.revoke(str(body.get("id"))),
        "promote": lambda body: node.promote(str(body.get("name"))),
        "pair": node.pair,
        "pair-answer": node.answer_pairing,
        "pair-end": lambda _: node.end_pairing(),
        "measure": node.measure,
        "qr": lambda body: {"picture": qr_code.picture(str(body.get("text", "")))},
        "stop": stop,
        "leave": leave,
        "unload": unload,
        "load": load,
        "pause": lambda _: node.pause(),
        "resume": lambda _: node.resume(),
        "load-model": node.load_model,
        "unload-model": node.unload_model,
        "use-model": node.use_model,
        "add-key": node.add_key,
        "revoke-key": node.revoke_key,
        "share": node.share,
        "stop-sharing": node.stop_sharing,
    }
    for name, answer in gets.items():
        app.router.add_get(f"/api/{name}", _answered(answer, reads_body=False))
    for name, answer in posts.items():
        app.router.add_post(f"/api/{name}", _answered(answer, reads_body=name in _WITH_BODY))
    app.router.add_get("/api/events", get_events)


def _agents(status: dict[str, Any]) -> list[dict[str, str]]:
    """What to type and paste for each, as soon as there is something to talk to."""
    api, model = status["api"], status["model"]
    if not api["url"] or not model:
        raise MeshError("this node has no API or no model yet", hint="try again in a moment")
    return snippets(as_typed(api["url"]), model["name"], model["context"], key_needed=api["key_needed"])


def _answered(answer: Answer, *, reads_body: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The answer as JSON; an expected failure as its sentence."""

    async def respond(request: web.Request) -> web.Response:
        try:
            found = answer(await _body(request) if reads_body else {})
            document = await found if isinstance(found, Awaitable) else found
        except MeshError as error:
            return refusal(400 if isinstance(error, UsageError) else 409, error.message, error.hint)
        except OSError as error:
            # A full disk, above all.
            told = of_system(error)
            log.warning("not done path=%s cause=%s", request.path, told.message)
            return refusal(409, told.message, told.hint)
        return web.json_response(document, headers={"Cache-Control": "no-store"})

    return respond


def refusal(status: int, message: str, hint: str | None = None, **more: Any) -> web.Response:
    return web.json_response({"error": message, "hint": hint, **more}, status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except web.HTTPRequestEntityTooLarge:
        raise UsageError(
            f"a request body must not be larger than {CONSOLE_BODY_LIMIT_BYTES >> 10} KiB"
        ) from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UsageError("a request body must be a JSON object")
    return body


def _asked_invite(asked: dict[str, Any]) -> tuple[Role, float | None, int | None]:
    lifetime_s = asked.get("lifetime_s")
    if lifetime_s is not None:
        number = isinstance(lifetime_s, int | float) and not isinstance(lifetime_s, bool)
        if not number or not 0 < lifetime_s < _HIGHEST_LIFETIME_S:
            raise UsageError("an invite must last at least a second and at most ten years")
    limit = asked.get("uses")
    if limit is not None and (type(limit) is not int or not 1 <= limit <= _HIGHEST_USES):
        raise UsageError(f"an invite can be limited to 1 to {_HIGHEST_USES} uses")
    try:
        return Role(asked.get("role", "node")), lifetime_s, limit
    except ValueError:
        raise UsageError("an invite must be for an owner, a node or a client") from None


async def _events(request: web.Request, feed: Feed) -> web.StreamResponse:
    """The node as it goes along, until one of both ends."""
    if feed.is_full:
        return refusal(503, f"{feed.watchers} pages watch this node already", "close some of them")
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    response.enable_chunked_encoding()
    await response.prepare(request)
    # Takes the head along.
    await response.write(BEAT)
    if (transport := request.transport) is not None:
        try:
            # Cancelled when the connection ends.
            async with feed.watched(transport):
                await feed.ended.wait()
        except Crowded:
            transport.abort()
    return response


@asynccontextmanager
async def serve_on_socket(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Answer on a unix socket that only its owner can open."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        # Its folder is 0700; the mask closes the socket itself as well, from its first moment.
        previous = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(previous)
        yield
    finally:
        await runner.cleanup()
