"""`/api/…`: what `mesh-llm status`, `stop`, `invite` and others call on the running node."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from mesh_llm.errors import MeshError
from mesh_llm.types import Role

_HIGHEST_LIFETIME_S = 10 * 366 * 86400.0


class Managed(Protocol):
    """The node, as far as these routes know it."""

    async def status(self) -> dict[str, Any]: ...

    def stop(self, *, leave: bool = False) -> None: ...

    async def plan(self, wishes: dict[str, Any]) -> dict[str, Any]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def invite(self, role: Role, lifetime_s: float | None) -> dict[str, Any]: ...

    def invites(self) -> dict[str, Any]: ...

    def revoke(self, id: str) -> dict[str, Any]: ...


def management_app(node: Managed) -> web.Application:
    async def get_status(request: web.Request) -> dict[str, Any]:
        return await node.status()

    async def post_stop(request: web.Request) -> dict[str, Any]:
        node.stop()
        return {"stopping": True, "pid": os.getpid()}

    async def post_leave(request: web.Request) -> dict[str, Any]:
        node.stop(leave=True)
        return {"leaving": True, "pid": os.getpid()}

    async def get_plan(request: web.Request) -> dict[str, Any]:
        return await node.plan({})

    async def post_plan(request: web.Request) -> dict[str, Any]:
        return await node.plan(await request.json())

    async def get_snapshot(request: web.Request) -> dict[str, Any]:
        return node.snapshot()

    async def post_invite(request: web.Request) -> dict[str, Any]:
        asked = await request.json()
        lifetime_s = asked.get("lifetime_s")
        if lifetime_s is not None and not 0 < float(lifetime_s) < _HIGHEST_LIFETIME_S:
            raise MeshError("an invite lives for a second at least, and for ten years at most")
        return node.invite(Role(asked.get("role", "node")), lifetime_s)

    async def get_invites(request: web.Request) -> dict[str, Any]:
        return node.invites()

    async def post_revoke(request: web.Request) -> dict[str, Any]:
        return node.revoke(str((await request.json()).get("id")))

    app = web.Application()
    app.router.add_get("/api/status", _answered(get_status))
    app.router.add_get("/api/plan", _answered(get_plan))
    app.router.add_post("/api/plan", _answered(post_plan))
    app.router.add_get("/api/snapshot", _answered(get_snapshot))
    app.router.add_get("/api/invites", _answered(get_invites))
    app.router.add_post("/api/invite", _answered(post_invite))
    app.router.add_post("/api/revoke", _answered(post_revoke))
    app.router.add_post("/api/stop", _answered(post_stop))
    app.router.add_post("/api/leave", _answered(post_leave))
    return app


def _answered(
    handler: Callable[[web.Request], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The answer as JSON; an expected failure as its sentence."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(await handler(request))
        except MeshError as error:
            return web.json_response({"error": error.message, "hint": error.hint}, status=409)

    return answer


@asynccontextmanager
async def serve_on_socket(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Answer on a unix socket that only its owner can open."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
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
