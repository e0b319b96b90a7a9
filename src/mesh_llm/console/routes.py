"""`/api/…`: what the page and `mesh-llm status`, `stop`, `invite` and others call on the running node."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from mesh_llm.agents.config_files import as_typed
from mesh_llm.agents.snippets import snippets
from mesh_llm.console.event_feed import BEAT, Crowded, Feed
from mesh_llm.defaults import CONSOLE_BODY_LIMIT_BYTES
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.types import Role

_HIGHEST_LIFETIME_S = 10 * 366 * 86400.0
_HIGHEST_USES = 1_000_000


class Managed(Protocol):
    """The node, as far as these routes know it."""

    async def status(self) -> dict[str, Any]: ...

    def stop(self, *, leave: bool = False) -> None: ...

    def unload(self) -> None: ...

    def load(self) -> None: ...

    async def plan(self, wishes: dict[str, Any]) -> dict[str, Any]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def invite(self, role: Role, lifetime_s: float | None, limit: int | None = None) -> dict[str, Any]: ...

    def promote(self, name: str) -> dict[str, Any]: ...

    def invites(self) -> dict[str, Any]: ...

    def revoke(self, id: str) -> dict[str, Any]: ...


Answer = Callable[[web.Request], Awaitable[dict[str, Any]]]


def management_app(node: Managed, feed: Feed) -> web.Application:
    """All of them, for whoever may open the socket."""
    app = web.Application(client_max_size=CONSOLE_BODY_LIMIT_BYTES)
    add_management(app, node, feed)
    return app


def add_management(app: web.Application, node: Managed, feed: Feed) -> None:
    async def get_status(request: web.Request) -> dict[str, Any]:
        return await node.status()

    async def post_stop(request: web.Request) -> dict[str, Any]:
        node.stop()
        return {"stopping": True, "pid": os.getpid(), "parent_pid": os.getppid()}

    async def post_leave(request: web.Request) -> dict[str, Any]:
        node.stop(leave=True)
        return {"leaving": True, "pid": os.getpid()}

    async def post_unload(request: web.Request) -> dict[str, Any]:
        node.unload()
        return {"unloading": True}

    async def post_load(request: web.Request) -> dict[str, Any]:
        node.load()
        return {"loading": True}

    async def get_plan(request: web.Request) -> dict[str, Any]:
        return await node.plan({})

    async def post_plan(request: web.Request) -> dict[str, Any]:
        return await node.plan(await _body(request))

    async def get_snapshot(request: web.Request) -> dict[str, Any]:
        return node.snapshot()

    async def post_invite(request: web.Request) -> dict[str, Any]:
        return node.invite(*_asked_invite(await _body(request)))

    async def get_invites(request: web.Request) -> dict[str, Any]:
        return node.invites()

    async def post_revoke(request: web.Request) -> dict[str, Any]:
        return node.revoke(str((await _body(request)).get("id")))

    async def post_promote(request: web.Request) -> dict[str, Any]:
        return node.promote(str((await _body(request)).get("name")))

    async def get_agents(request: web.Request) -> dict[str, Any]:
        return {"agents": _agents(await node.status())}

    async def get_events(request: web.Request) -> web.StreamResponse:
        return await _events(request, feed)

    gets: dict[str, Answer] = {
        "status": get_status,
        "plan": get_plan,
        "snapshot": get_snapshot,
        "invites": get_invites,
        "agents": get_agents,
    }
    posts: dict[str, Answer] = {
        "plan": post_plan,
        "invite": post_invite,
        "revoke": post_revoke,
        "promote": post_promote,
        "stop": post_stop,
        "leave": post_leave,
        "unload": post_unload,
        "load": post_load,
    }
    for name, handler in gets.items():
        app.router.add_get(f"/api/{name}", _answered(handler))
    for name, handler in posts.items():
        app.router.add_post(f"/api/{name}", _answered(handler))
    app.router.add_get("/api/events", get_events)


def _agents(status: dict[str, Any]) -> list[dict[str, str]]:
    """What to type and paste for each, as soon as there is something to talk to."""
    api, model = status["api"], status["model"]
    if not api["url"] or not model:
        raise MeshError("this node has no API or no model yet", hint="try again in a moment")
    return snippets(as_typed(api["url"]), model["name"], model["context"], key_needed=api["key_needed"])


def _answered(handler: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The answer as JSON; an expected failure as its sentence."""

    async def answer(request: web.Request) -> web.Response:
        try:
            document = await handler(request)
        except MeshError as error:
            return refusal(400 if isinstance(error, UsageError) else 409, error.message, error.hint)
        return web.json_response(document, headers={"Cache-Control": "no-store"})

    return answer


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
