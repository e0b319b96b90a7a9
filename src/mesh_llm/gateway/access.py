"""Who may use the API: holders of the key or, where there is none, programs of this machine.

Web pages are told from programs by two headers (`loopback`). With a key neither matters: a
page has no key.
"""

from __future__ import annotations

import hmac

from aiohttp import web

from mesh_llm.gateway import api_errors
from mesh_llm.loopback import Names

HEALTH_PATHS = frozenset({"/health", "/v1/health"})


class ApiAccess:
    def __init__(self, *, api_key: str | None, listen: str) -> None:
        self._key = None if api_key is None else api_key.encode()
        self._names = Names(listen)

    def check(self, request: web.BaseRequest, *, public: bool = False) -> None:
        """Raise the refusal, if there is one. `public`: what is asked for needs no key."""
        if self._key is None:
            self._check_names(request)
        elif not (public or request.path in HEALTH_PATHS or _is_preflight(request) or self._has_key(request)):
            raise api_errors.wrong_key()

    def knows(self, request: web.BaseRequest) -> bool:
        """Whether who asks may be told names; where there is a key, its holders may."""
        return self._key is None or self._has_key(request)

    def page(self, request: web.BaseRequest) -> str | None:
        """The origin of the page that asks, if there is one that may read an answer of ours.

        With a key that is any page: whoever has none learns from the refusal what it lacks.
        """
        origins = request.headers.getall("Origin", [])
        if len(origins) != 1 or not (origins[0].isascii() and origins[0].isprintable()):
            return None
        if self._key is None and not (self._means_us(request) and self._names.are_local(origins)):
            return None
        return origins[0] or None

    def _has_key(self, request: web.BaseRequest) -> bool:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        offered += request.headers.getall("x-api-key", [])
        return any(self._matches(key) for key in offered)

    def _matches(self, offered: str) -> bool:
        assert self._key is not None
        return hmac.compare_digest(offered.encode(errors="surrogateescape"), self._key)

    def _check_names(self, request: web.BaseRequest) -> None:
        if not self._means_us(request):
            raise api_errors.forbidden(
                "this API must be called as localhost; other names need a node with --api-key",
                code="foreign_host",
            )
        if not self._names.are_local(request.headers.getall("Origin", [])):
            raise api_errors.forbidden(
                "web pages of other origins may not use this API; they need a node with --api-key",
                code="foreign_origin",
            )

    def _means_us(self, request: web.BaseRequest) -> bool:
        return self._names.mean_us(request.headers.getall("Host", []))


def _is_preflight(request: web.BaseRequest) -> bool:
    # A browser asks before it sends the key, and never sends it with the question.
    # The answer is headers only, and says nothing that depends on a key.
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )
