"""Who may use the API: holders of a key or, where none is needed, programs of this machine.

Web pages are told from programs by two headers (`loopback`). Where a key is needed neither matters: a
page has no key. Named keys (`keys`) have rights of their own; the key of --api-key may do everything.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator

from aiohttp import web

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.key_usage import OWN
from mesh_llm.gateway.keys import ApiKey, Keys
from mesh_llm.loopback import Names
from mesh_llm.same_user import is_of_another_user

HEALTH_PATHS = frozenset({"/health", "/v1/health"})


@frozen
class Admission:
    """By what right a request was let in."""

    key: ApiKey | None
    """None: without one, as a program of this machine."""


_ADMISSION = web.RequestKey("mesh_llm_admission", Admission)


def may_manage(request: web.BaseRequest) -> bool:
    """Whether who asks may change what is served, and not only ask.

    With a key, where that has the right; without one, where none is needed and the node's own user asks.
    """
    admission = request.get(_ADMISSION)
    if admission is None:
        return False
    return admission.key.manage if admission.key is not None else not is_of_another_user(request.transport)


def key_of(request: web.BaseRequest) -> ApiKey | None:
    """The key that a request was let in by."""
    admission = request.get(_ADMISSION)
    return admission.key if admission is not None else None


def is_known(request: web.BaseRequest) -> bool:
    """Whether who asks may be told names; where a key is needed, holders of one may."""
    return _ADMISSION in request


class ApiAccess:
    """`is_shared`: for the local network, where nothing but named keys opens."""

    def __init__(
        self, *, api_key: str | None, listen: str, keys: Keys | None = None, is_shared: bool = False
    ) -> None:
        self._key = None if api_key is None or is_shared else api_key.encode()
        self._needs_key = api_key is not None or is_shared
        self._keys = keys or Keys(None)
        self._names = Names(listen)

    def check(self, request: web.BaseRequest, *, public: bool = False) -> None:
        """Raise the refusal, if there is one. `public`: what is asked for needs no key."""
        key = self._find(request)
        if not self._needs_key:
            self._check_names(request)
        elif key is None and not (public or request.path in HEALTH_PATHS or _is_preflight(request)):
            raise api_errors.wrong_key()
        if key is not None and key.is_expired(time.time()):
            raise api_errors.wrong_key(f"the key {key.name} has expired")
        if key is not None or not self._needs_key:
            request[_ADMISSION] = Admission(key=key)

    def page(self, request: web.BaseRequest) -> str | None:
        """The origin of the page that asks, if there is one that may read an answer of ours.

        Where a key is needed that is any page: whoever has none learns from the refusal what it lacks.
        """
        origins = request.headers.getall("Origin", [])
        if len(origins) != 1 or not (origins[0].isascii() and origins[0].isprintable()):
            return None
        if not self._needs_key and not (self._means_us(request) and self._names.are_local(origins)):
            return None
        return origins[0] or None

    def _find(self, request: web.BaseRequest) -> ApiKey | None:
        for offered in _offered(request):
            if self._key is not None and _same(offered, self._key):
                return OWN
            if (key := self._keys.find(offered)) is not None:
                return key
        return None

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


def _offered(request: web.BaseRequest) -> Iterator[str]:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    yield from request.headers.getall("x-api-key", [])


def _same(offered: str, key: bytes) -> bool:
    return hmac.compare_digest(offered.encode(errors="surrogateescape"), key)


def _is_preflight(request: web.BaseRequest) -> bool:
    # A browser asks before it sends the key, and never sends it with the question.
    # The answer is headers only, and says nothing that depends on a key.
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )
