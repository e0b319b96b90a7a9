"""A model hub on loopback: enough of the real one's protocol, and every way in which it can fail.

The hub itself is at 127.0.0.1, its storage at localhost on another port: as with
the real one, files are redirected to a host that must not see the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CHUNK_BYTES = 64 << 10
_SIGNED = "name=UTF-8%27%27model%2Fa&signature=secret-signature%7E"
"""Good as it was given, letter for letter: as with storage that signs its addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request, as it arrived."""

    at: str
    """`hub` or `storage`."""
    method: str
    path: str
    headers: dict[str, str]

    @property
    def start(self) -> int:
        """The first byte that was asked for."""
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        return int(found[1]) if found else 0


@dataclass(kw_only=True)
class Stored:
    """One file, and what is wrong with it."""

    data: bytes
    etag: str
    said_size: int | None = None
    sent: bytes | None = None
    """Other bytes than those it is said to have."""

    @classmethod
    def of(cls, data: bytes) -> Stored:
        return cls(data=data, etag=hashlib.sha256(data).hexdigest())

    @property
    def body(self) -> bytes:
        return self.data if self.sent is None else self.sent


@dataclass(kw_only=True)
class Faults:
    """What goes wrong next. Lists are used up from the front, one item a request."""

    hub: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers of the hub instead of the right ones."""
    storage: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Bytes of an answer after which the connection is cut."""
    stalls: list[int] = field(default_factory=list)
    """Bytes after which nothing comes any more."""
    holds: list[int] = field(default_factory=list)
    """Bytes after which the rest waits until `Hub.release`."""
    hub_stalls: bool = False
    ignore_ranges: bool = False
    chunked: bool = False
    """Answers that do not say how long they are."""
    no_marks: bool = False
    """Plain files without an ETag or a date."""
    pause_s: float = 0.0
    """Between two chunks."""
    chunk_bytes: int = _CHUNK_BYTES


class Hub:
    """A thread with a loop and two servers; the block ends them."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Stored]] = {}
        self.plain: dict[str, Stored] = {}
        """Files that any web server would have, at /plain/NAME of the storage."""
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.token: str | None = None
        """Asked for where it is set."""
        self.gated = False
        self.redirects = True
        self.most_at_once = 0
        self._at_once = 0
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._runners: list[web.AppRunner] = []

    # -- what tests say ----------------------------------------------------------------------------

    def put(self, repo: str, file: str, data: bytes) -> Stored:
        stored = self.repos.setdefault(repo, {})[file] = Stored.of(data)
        return stored

    @property
    def env(self) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "",
            "NO_PROXY": "127.0.0.1,localhost",
            "MESH_LLM_DOWNLOAD_PAUSE_S": "0.05",
        }

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def got(self, at: str, *, method: str = "GET") -> list[Seen]:
        return [each for each in self.seen if each.at == at and each.method == method]

    # -- its life ----------------------------------------------------------------------------------

    def __enter__(self) -> Hub:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._on_loop(self._serve(self._hub))}"
        self.storage_url = f"http://localhost:{self._on_loop(self._serve(self._storage))}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _on_loop(self, work: Coroutine[None, None, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(30)

    async def _serve(self, handler: Any) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runners.append(runner)
        port: int = runner.addresses[0][1]
        return port

    async def _end(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
        # Answers that were to stall for ever.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=2)

    # -- the hub -----------------------------------------------------------------------------------

    async def _hub(self, request: web.Request) -> web.StreamResponse:
        self._note("hub", request)
        if self.faults.hub_stalls:
            await asyncio.sleep(3600)
        if self.faults.hub:
            status, headers = self.faults.hub.pop(0)
            return web.Response(status=status, headers=headers)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", request.path):
            return self._info(found[1], found[2])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path):
            return await self._resolve(request, found[1], found[2], found[3])
        return web.Response(status=404)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.token is None or request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        known = "Authorization" in request.headers
        code = {"X-Error-Code": "GatedRepo"} if self.gated else {}
        return web.Response(status=403 if known else 401, headers=code)

    def _info(self, repo: str, revision: str) -> web.Response:
        if repo not in self.repos:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if revision != "main":
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {
                "rfilename": name,
                "size": len(stored.data),
                "blobId": "0" * 40,
                "lfs": {"size": len(stored.data), "sha256": stored.etag, "pointerSize": 135},
            }
            for name, stored in self.repos[repo].items()
        ]
        return web.json_response({"id": repo, "modelId": repo, "sha": "c" * 40, "siblings": siblings})

    async def _resolve(self, request: web.Request, repo: str, revision: str, file: str) -> web.StreamResponse:
        stored = self.repos.get(repo, {}).get(file)
        if stored is None or revision != "main":
            code = "RepoNotFound" if repo not in self.repos else "EntryNotFound"
            code = "RevisionNotFound" if revision != "main" else code
            return web.Response(status=404, headers={"X-Error-Code": code})
        size = len(stored.data) if stored.said_size is None else stored.said_size
        headers = {"X-Repo-Commit": "c" * 40, "ETag": f'"{stored.etag}"', "Accept-Ranges": "bytes"}
        if not self.redirects:
            return await self._send(request, stored, headers)
        headers |= {
            "X-Linked-Etag": f'"{stored.etag}"',
            "X-Linked-Size": str(size),
            "Location": f"{self.storage_url}/blobs/{repo}/{file}?{_SIGNED}",
        }
        return web.Response(status=302, headers=headers)

    # -- its storage -------------------------------------------------------------------------------

    async def _storage(self, request: web.Request) -> web.StreamResponse:
        self._note("storage", request)
        if self.faults.storage:
            status, headers = self.faults.storage.pop(0)
            return web.Response(status=status, headers=headers)
        if request.path.startswith("/plain/"):
            stored = self.plain.get(request.path.removeprefix("/plain/"))
            marks = {} if self.faults.no_marks or stored is None else {"ETag": f'"{stored.etag}"'}
            return await self._send(request, stored, marks) if stored else web.Response(status=404)
        found = re.fullmatch(r"/blobs/([^/]+/[^/]+)/(.+)", request.path)
        stored = self.repos.get(found[1], {}).get(found[2]) if found else None
        if stored is None or request.raw_path.partition("?")[2] != _SIGNED:
            return web.Response(status=403)
        return await self._send(request, stored, {"ETag": '"an-etag-of-the-storage"'})

    async def _send(
        self, request: web.Request, stored: Stored, headers: dict[str, str]
    ) -> web.StreamResponse:
        body, start, end = stored.body, 0, len(stored.body)
        found = _RANGE.fullmatch(request.headers.get("Range", ""))
        condition = request.headers.get("If-Range")
        if condition is not None and condition != headers.get("ETag"):
            found = None
        status = 200
        if found and not self.faults.ignore_ranges:
            start = int(found[1])
            end = min(int(found[2]) + 1, end) if found[2] else end
            if start >= len(body):
                return web.Response(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
            status = 206
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
        response = web.StreamResponse(status=status, headers=headers)
        if not self.faults.chunked:
            response.content_length = end - start
        # A question about the first byte is no download: faults are for those.
        whole = end - start > 1
        cut = self.faults.cuts.pop(0) if whole and self.faults.cuts else None
        stall = self.faults.stalls.pop(0) if whole and self.faults.stalls else None
        hold = self.faults.holds.pop(0) if whole and self.faults.holds else len(body)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            with suppress(ConnectionError):
                await self._write(request, response, body[start:end], cut=cut, stall=stall, hold=hold)
        finally:
            self._at_once -= 1
        return response

    async def _write(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: bytes,
        *,
        cut: int | None,
        stall: int | None,
        hold: int,
    ) -> None:
        limit = len(body)
        for bound in (cut, stall):
            limit = min(limit, bound) if bound is not None else limit
        for at in range(0, limit, self.faults.chunk_bytes):
            if at >= hold:
                await self._released.wait()
            await response.write(body[at : min(at + self.faults.chunk_bytes, limit)])
            if self.faults.pause_s:
                await asyncio.sleep(self.faults.pause_s)
        if cut is not None and request.transport is not None:
            request.transport.close()
            raise ConnectionResetError
        if stall is not None:
            await asyncio.sleep(3600)
        await response.write_eof()

    def _note(self, at: str, request: web.Request) -> None:
        self.seen.append(Seen(at=at, method=request.method, path=request.path, headers=dict(request.headers)))
