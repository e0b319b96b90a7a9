"""Who may use the API: holders of the key or, where there is none, programs of this machine.

A web page can make its visitor's browser call `http://localhost:9337`. Two headers that
a page cannot forge give it away: `Origin`, and `Host` where the page's own name was made
to resolve to 127.0.0.1 (DNS rebinding). With a key neither matters: the page has no key.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from aiohttp import web

from mesh_llm.gateway import failures

HEALTH_PATHS = frozenset({"/health", "/v1/health"})
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine reach `address`; names other than localhost do not count."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Guard:
    def __init__(self, *, api_key: str | None, listen: str) -> None:
        self._key = None if api_key is None else api_key.encode()
        names = {*_LOOPBACK_NAMES, f"[{listen}]" if ":" in listen else listen}
        host = "(?:" + "|".join(re.escape(name) for name in sorted(names)) + ")(?::[0-9]{1,5})?"
        self._host = re.compile(host, re.IGNORECASE)
        self._origin = re.compile(f"https?://{host}", re.IGNORECASE)

    def check(self, request: web.BaseRequest) -> None:
        """Raise the refusal, if there is one."""
        if self._key is None:
            self._check_names(request)
        elif not (request.path in HEALTH_PATHS or _is_preflight(request) or self._has_key(request)):
            raise failures.wrong_key()

    def _has_key(self, request: web.BaseRequest) -> bool:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        offered += request.headers.getall("x-api-key", [])
        return any(self._matches(key) for key in offered)

    def _matches(self, offered: str) -> bool:
        assert self._key is not None
        return hmac.compare_digest(offered.encode(errors="surrogateescape"), self._key)

    def _check_names(self, request: web.BaseRequest) -> None:
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._host.fullmatch(hosts[0]):
            raise failures.forbidden(
                "this API answers to localhost only; other names need a node with --api-key",
                code="foreign_host",
            )
        # A page without an origin of its own (a file, a sandboxed frame) says "null": a stranger, too.
        if not all(self._origin.fullmatch(origin) for origin in request.headers.getall("Origin", [])):
            raise failures.forbidden(
                "web pages from elsewhere may not use this API; they need a node with --api-key",
                code="foreign_origin",
            )


def _is_preflight(request: web.BaseRequest) -> bool:
    # A browser asks before it sends the key, and never sends it with the question.
    # The engine answers this without looking at the key either, and with headers only.
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )
