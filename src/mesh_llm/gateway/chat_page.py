"""What a browser finds at the API's own address: llama.cpp's web page, from this node's own files.

Everybody may load it, and it holds no secret; what it asks of the API needs the key, where there is one,
and the page asks a person for that. Of reasons why nothing is served, llama.cpp's page knows one, that a
model is loading. So whoever comes meanwhile finds a page of ours with the sentence, and it looks again.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from mesh_llm.frozen import frozen
from mesh_llm.web_files import content_type, entity_tag

_INDEX = "index.html"
_NEVER_CHANGES = "_app/immutable/"
"""Names with a hash in them."""
_WORKER = "sw.js"
_NO_WORKER = b"""// Pages come from the node, never from a copy in the browser: one that was kept here goes.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) =>
  event.waitUntil(caches.keys().then((names) => Promise.all(names.map((name) => caches.delete(name))))),
);
"""
"""In place of the page's service worker, which would show an old version's page after an upgrade."""
_STYLE = "mesh-llm.css"
"""Ours, after the page's own."""
_LINK = f'<link rel="stylesheet" href="./{_STYLE}">'.encode()
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Models that hear are spoken to.
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
    "Vary": "Accept-Encoding",
}
_OURS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
{refresh}<title>mesh-llm</title>
<h1>mesh-llm</h1>
<p role="status">{sentence}</p>
{more}</html>
"""
_CHAT = f'<p><a href="/{_INDEX}">Open the chat</a> all the same.</p>\n'
_REFRESH = '<meta http-equiv="refresh" content="1">\n'


@frozen
class _File:
    packed: bytes
    kind: str
    tag: str
    cache: str


class ChatPage:
    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._policy = _policy(b"")
        self._lacking: str | None = None

    def fill(self, files: Mapping[str, bytes]) -> None:
        """`files`: by name, each packed with gzip."""
        index = gzip.decompress(files[_INDEX]).replace(b"</head>", _LINK + b"</head>", 1)
        ours = {_INDEX: index, _STYLE: _style(), _WORKER: _NO_WORKER}
        found = {**files, **{name: gzip.compress(body, mtime=0) for name, body in ours.items()}}
        self._policy = _policy(index)
        self._files = {
            f"/{name}": _file(name, packed, kind)
            for name, packed in found.items()
            if (kind := content_type(name)) is not None
        }
        self._files["/"] = self._files[f"/{_INDEX}"]

    def lack(self, sentence: str) -> None:
        """There is no page here, and why."""
        self._lacking = sentence

    def has(self, request: web.BaseRequest) -> bool:
        """Whether it is the page, or a part of it, that is asked for."""
        return request.method in ("GET", "HEAD") and (request.path == "/" or request.path in self._files)

    def answer(self, request: web.BaseRequest, waiting: str | None) -> web.Response:
        """`waiting`: why no model is served, where none is."""
        headers = {**_HEADERS, "Content-Security-Policy": self._policy}
        file = self._files.get(request.path)
        if file is None:
            return self._instead(headers)
        if waiting is not None and request.path == "/":
            return _ours(waiting, headers, refresh=_REFRESH, more=_CHAT)
        headers |= {"Content-Type": file.kind, "ETag": file.tag, "Cache-Control": file.cache}
        if file.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=gzip.decompress(file.packed), headers=headers)
        return web.Response(body=file.packed, headers={**headers, "Content-Encoding": "gzip"})

    def _instead(self, headers: dict[str, str]) -> web.Response:
        if self._lacking is None:
            return _ours("The chat is being prepared.", headers, refresh=_REFRESH)
        return _ours(f"There is no chat here: {self._lacking}. The API works, under /v1.", headers)


def _ours(sentence: str, headers: dict[str, str], *, refresh: str = "", more: str = "") -> web.Response:
    text = _OURS.format(refresh=refresh, sentence=html.escape(sentence), more=more)
    headers |= {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
    return web.Response(status=503, body=text.encode(), headers=headers)


def _style() -> bytes:
    return Path(__file__).with_name("static").joinpath("chat.css").read_bytes()


def _file(name: str, packed: bytes, kind: str) -> _File:
    lasting = name.startswith(_NEVER_CHANGES)
    return _File(
        packed=packed,
        kind=kind,
        tag=entity_tag(packed),
        cache="public, max-age=31536000, immutable" if lasting else "no-cache",
    )


def _policy(index: bytes) -> str:
    """Nothing from elsewhere and nothing to elsewhere; of scripts in the page the one that starts it."""
    known = [b64encode(hashlib.sha256(script).digest()).decode() for script in _SCRIPT.findall(index)]
    return "; ".join(
        (
            "default-src 'none'",
            " ".join(("script-src 'self'", *(f"'sha256-{digest}'" for digest in known))),
            # Formulas and colours are set on single elements.
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "media-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            # Documents are read in a worker that the page makes from its own code.
            "worker-src 'self' blob:",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
