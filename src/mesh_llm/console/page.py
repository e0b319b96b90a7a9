"""The page's files: package data, sent as they are."""

from __future__ import annotations

import re
from importlib import resources

from aiohttp import web

from mesh_llm.console.access import Refused
from mesh_llm.web_files import content_type, entity_tag

_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*){0,3}", re.ASCII)
"""No part begins with a dot: no way leads out of the folder."""
_FOLDER = resources.files("mesh_llm.console").joinpath("static")


async def get_file(request: web.Request) -> web.Response:
    name = request.match_info["name"] or "index.html"
    kind = content_type(name)
    file = _FOLDER.joinpath(*name.split("/")) if _NAME.fullmatch(name) else None
    if kind is None or file is None or not file.is_file():
        raise Refused(404, "there is no such page", code="not_found")
    body = file.read_bytes()
    tag = entity_tag(body)
    # Asked for each time and sent once: another version of the program has other files.
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers={**headers, "Content-Type": kind})
