"""`/api/status`, `/api/stop`: the routes that `mesh-llm status` and `stop` call."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Status = Callable[[], Awaitable[dict[str, Any]]]
Stop = Callable[[], None]


def management_app(*, status: Status, stop: Stop) -> web.Application:
    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(await status())

    async def post_stop(request: web.Request) -> web.Response:
        stop()
        return web.json_response({"stopping": True, "pid": os.getpid()})

    app = web.Application()
    app.router.add_get("/api/status", get_status)
    app.router.add_post("/api/stop", post_stop)
    return app


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
