"""`/v1/…` for the page, passed on to the node's own API.

The page may not call the API port itself: its content policy keeps it to its own origin,
and the API's key, where there is one, does not leave this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import field

import aiohttp
from aiohttp import web
from yarl import URL

from mesh_llm.console.access import Refused
from mesh_llm.frozen import frozen

CONSOLE_CHATS = 32
"""Answers under way for all pages together; the API's own queue is shorter."""
CONSOLE_CONNECT_S = 5.0
"""To the node's own API, in the same process."""


_PASSED_ON = ("Accept", "Content-Type", "Content-Length", "Prefer", "X-Request-Id")
_PASSED_BACK = ("Content-Type", "Content-Length", "Retry-After", "X-Mesh-LLM-Served-By")


@frozen
class Api:
    """Where the node's own API is, and what it asks for."""

    url: str
    key: str | None = field(default=None, repr=False)


class ApiProxy:
    def __init__(self, api: Callable[[], Api | None]) -> None:
        """`api`: None while it is not open."""
        self._api = api
        self._session: aiohttp.ClientSession | None = None
        self._under_way = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Ends with its client: a page that stops, or goes, stops the engine, too."""
        api = self._api()
        if api is None:
            raise Refused(503, "the API is not open yet", code="not_ready")
        if self._under_way >= CONSOLE_CHATS:
            raise Refused(429, "too many answers are open on this page", code="too_many_requests")
        self._under_way += 1
        try:
            return await self._pass_on(request, api)
        finally:
            self._under_way -= 1

    async def _pass_on(self, request: web.Request, api: Api) -> web.StreamResponse:
        target = _target(api, request)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        # A packed answer would be passed on without the word that it is.
        headers["Accept-Encoding"] = "identity"
        if api.key is not None:
            headers["Authorization"] = f"Bearer {api.key}"
        response: web.StreamResponse | None = None
        try:
            async with self._open_session().request(
                request.method,
                target,
                headers=headers,
                data=request.content if request.body_exists else None,
                allow_redirects=False,
                # It is this process that answers there, whatever name its certificate has.
                ssl=False,
            ) as answer:
                back = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=back)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None:
                raise Refused(502, f"the node's API does not answer: {error}", code="api_lost") from error
            # Half an answer must not look like a whole one.
            if request.transport is not None:
                request.transport.abort()
            return response

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Without a limit on the whole: the API bounds its own waits, and an answer may take long.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONSOLE_CONNECT_S)
            connector = aiohttp.TCPConnector(limit=CONSOLE_CHATS, loop=asyncio.get_running_loop())
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False, trust_env=False
            )
        return self._session


def _target(api: Api, request: web.Request) -> URL:
    """The same path there; nothing where dots in it lead out of what the page may use."""
    try:
        target = URL(api.url + request.raw_path)
    except ValueError:
        target = URL()
    if not target.path.startswith("/v1/"):
        raise Refused(404, "there is no such path", code="not_found")
    return target
