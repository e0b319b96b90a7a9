"""What a browser is told of a file of a page: its type, and a tag that changes with its bytes."""

from __future__ import annotations

import hashlib

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "webmanifest": "application/manifest+json",
    "woff2": "font/woff2",
}


def content_type(name: str) -> str | None:
    """None: no page has such files, so none is sent."""
    return _TYPES.get(name.rpartition(".")[2])


def entity_tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
