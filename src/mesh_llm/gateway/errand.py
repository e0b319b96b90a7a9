"""A client's request in the words in which the engine gets it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from mesh_llm.gateway import failures
from mesh_llm.gateway.dialects import PATHS as DIALECT_PATHS
from mesh_llm.gateway.upstream import Turn, Upstream

# RFC 9110, 7.6.1: these speak of one connection, not of the message. Proxy-* go the same way, below.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
# Ours to say towards the engine: its name, its key, and the framing of the body. And what is for us to heed.
_REPLACED = frozenset({"host", "authorization", "x-api-key", "content-length", "expect", "prefer"}) | {
    # With it the engine goes on for a client that has left, in a slot that nobody counts.
    "x-conversation-id"
}
_TRAITS = ("Authorization", "x-api-key", "User-Agent")
_NAME = "x-mesh-llm-client"
_COMPUTES = DIALECT_PATHS | {
    "/v1/embeddings",
    "/embeddings",
    "/embedding",
    "/v1/rerank",
    "/rerank",
    "/v1/reranking",
    "/reranking",
    "/v1/audio/transcriptions",
    "/audio/transcriptions",
}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def end_to_end(headers: CIMultiDictProxy[str], *, without: Iterable[str] = ()) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    dropped = _HOP_BY_HOP.union(named, without)
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not name.lower().startswith("proxy-")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    method: str
    target: str
    """Path and query."""
    headers: CIMultiDict[str]
    path: str = ""
    """Decoded, without the query."""
    client: str = ""
    """Who asks, as well as it can be told; a key is not to be read from it."""
    name: str = ""
    """What that client calls itself this time, likewise."""

    @classmethod
    def of(cls, request: web.BaseRequest) -> Errand:
        return cls(
            method=request.method,
            target=_target(request),
            headers=end_to_end(request.headers, without=_REPLACED),
            path=request.path,
            client=_client(request),
            name=_digest(request.headers[_NAME]) if request.headers.get(_NAME) else "",
        )

    @property
    def takes_slot(self) -> bool:
        """It makes the engine compute."""
        return self.method == "POST" and self.path in _COMPUTES

    def turn(self, *, resumed: bool = False, within_s: float | None = None) -> Turn | None:
        """That it has to wait for, if it does."""
        if not self.takes_slot:
            return None
        return Turn(client=self.client, name=self.name, resumed=resumed, within_s=within_s)

    def head(self, upstream: Upstream, framing: dict[str, str]) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {upstream.authority}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"{name}: {value}" for name, value in framing.items()]
        lines += [f"Authorization: Bearer {upstream.key}"]
        if _CONTROL.search("".join(lines)):
            # A line end among them would be a header of its own, or a second request.
            raise failures.bad_request("the request's path and headers may hold no control characters")
        try:
            return ("\r\n".join(lines) + "\r\n\r\n").encode()
        except UnicodeEncodeError:
            raise failures.bad_request("the request's path and headers must be UTF-8") from None

    def with_body(self, upstream: Upstream, body: bytes) -> bytes:
        return self.head(upstream, {"Content-Length": str(len(body))}) + body


def small(method: str, target: str) -> Errand:
    """A question of our own."""
    return Errand(method=method, target=target, headers=CIMultiDict({"Content-Type": "application/json"}))


def _client(request: web.BaseRequest) -> str:
    # On one machine all have one address; by their keys and names most programs can be told apart.
    return _digest(request.remote or "", *(request.headers.get(name, "") for name in _TRAITS))


def _digest(*traits: str) -> str:
    return hashlib.blake2b("\0".join(traits).encode(errors="replace"), digest_size=12).hexdigest()


def _target(request: web.BaseRequest) -> str:
    """The path and query as the client wrote them.

    Always with a leading slash: appended to the engine's address, `@elsewhere/` would
    send the request, and the engine's key, elsewhere.
    """
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
    if not target.startswith("/") or request.method == "CONNECT":
        raise failures.bad_request("the request names no path of this API")
    return target
