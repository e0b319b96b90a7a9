"""A client's request in the words in which the engine gets it."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from aiohttp import web
from multidict import CIMultiDict

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.headers import to_engine
from mesh_llm.gateway.http_framing import has_control
from mesh_llm.gateway.routes import PLAIN, Route, route_of
from mesh_llm.gateway.upstream import SlotRequest, Upstream

_TRAITS = ("Authorization", "x-api-key", "User-Agent")
_NAME = "x-mesh-llm-client"


@frozen
class EngineRequest:
    method: str
    target: str
    """Path and query."""
    headers: CIMultiDict[str]
    route: Route = PLAIN
    client: str = ""
    """Who asks, as well as it can be told, where it has to wait; a key is not to be read from it."""
    name: str = ""
    """What that client calls itself this time, likewise."""

    @classmethod
    def of(cls, request: web.BaseRequest, *, translated: bool = True) -> EngineRequest:
        """`translated`: as `route_of` has it."""
        route = route_of(request.method, request.path, translated=translated)
        name = request.headers.get(_NAME, "")
        return cls(
            method=request.method,
            target=_target(request),
            headers=to_engine(request.headers),
            route=route,
            client=_client(request) if route.computes else "",
            name=_digest(name) if name and route.computes else "",
        )

    def turn(self, *, resumed: bool = False, within_s: float | None = None) -> SlotRequest | None:
        """That it has to wait for, if it does."""
        if not self.route.computes:
            return None
        return SlotRequest(client=self.client, name=self.name, resumed=resumed, within_s=within_s)

    def head(self, upstream: Upstream, framing: dict[str, str]) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {upstream.authority}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"{name}: {value}" for name, value in framing.items()]
        if upstream.key:
            lines += [f"Authorization: Bearer {upstream.key}"]
        try:
            head = "\r\n".join([*lines, "", ""]).encode()
        except UnicodeEncodeError:
            raise api_errors.bad_request("the request's path and headers must be UTF-8") from None
        if has_control("".join(lines).encode()):
            # A line end among them would be a header of its own, or a second request.
            raise api_errors.bad_request("the request's path and headers may hold no control characters")
        return head

    def with_body(self, upstream: Upstream, body: bytes) -> bytes:
        return self.head(upstream, {"Content-Length": str(len(body))}) + body


def small(method: str, target: str) -> EngineRequest:
    """A question of our own."""
    return EngineRequest(
        method=method, target=target, headers=CIMultiDict({"Content-Type": "application/json"})
    )


def _client(request: web.BaseRequest) -> str:
    # On one machine all have one address; by their keys and names most programs can be told apart.
    return _digest(request.remote or "", *(request.headers.get(name, "") for name in _TRAITS))


def _digest(*traits: str) -> str:
    return hashlib.blake2b("\0".join(traits).encode(errors="replace"), digest_size=12).hexdigest()


def _target(request: web.BaseRequest) -> str:
    """The path that was looked up in the table of routes, and the query as the client wrote it.

    Never the target as it came: an engine that reads it in another way would be asked for another route.
    """
    query = request.raw_path.partition("#")[0].partition("?")
    return quote(request.path, errors="replace") + query[1] + query[2]
