"""The page behind a guest's address: it takes the key from there, and leads to the chat.

Everybody may load it: the key is in the part of the address that a browser keeps to itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from mesh_llm.web_files import content_type

SHARE_PATH = "/share"
_FILES = {SHARE_PATH: "share.html", "/share.js": "share.js"}
_POLICY = "default-src 'none'; script-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_share_page(request: web.BaseRequest) -> bool:
    return request.method in ("GET", "HEAD") and request.path in _FILES


def share_page(request: web.BaseRequest) -> web.Response:
    name = _FILES[request.path]
    return web.Response(body=_read(name), headers={**_HEADERS, "Content-Type": content_type(name) or ""})


@cache
def _read(name: str) -> bytes:
    return (Path(__file__).with_name("static") / name).read_bytes()
