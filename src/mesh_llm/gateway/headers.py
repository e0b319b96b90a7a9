"""Which headers pass, either way: those that are listed, and no others."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

SAFE = {
    # An answer is data, whatever whoever computed it calls it: no page, no script, no frame on our origin.
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
}
"""On every answer."""
OURS = {"Server": "mesh-llm", **SAFE}
"""On every answer that is not the engine's."""

_TO_ENGINE = frozenset({"accept", "content-encoding", "content-type"})
_FROM_ENGINE = frozenset(
    {
        "cache-control",
        "content-encoding",
        "content-length",
        "content-type",
        "retry-after",
        "server",
        "x-accel-buffering",
    }
)


def to_engine(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Not its name, its key or the body's framing, which are ours to say; no cookie, no name of a client.

    Above all not `X-Conversation-Id`: with it the engine goes on for a client that has left, in a slot
    that nobody counts.
    """
    return _listed(headers, _TO_ENGINE)


def from_engine(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """No cookies, redirections or policies: the engine may be a stranger's, the origin is this node's."""
    return _listed(headers, _FROM_ENGINE)


def _listed(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    # RFC 9110, 7.6.1: what `Connection` names speaks of one connection, not of the message.
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    passed = names - named if named else names
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() in passed)
