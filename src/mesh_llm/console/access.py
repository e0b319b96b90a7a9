"""Who may use the console: the page that it serves itself, opened on this machine.

Every request has to call this server by a loopback name, and may come from no other
page's origin, a page on another port of this machine included. What changes something
needs the page's token on top: made anew with each start, given to the page only, opened
by the node's own user, and where the node has an API key only to whoever knows that.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from aiohttp import web

from mesh_llm.loopback import Names
from mesh_llm.same_user import is_of_another_user

PAGE_HEADER = "X-Mesh-LLM-Page"
_OWN_SITES = ("same-origin", "none")
"""`Sec-Fetch-Site` of the page's own requests, and of an address that a person typed."""


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, message: str, *, hint: str | None = None, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint
        self.code = code


class ConsoleAccess:
    def __init__(self, *, api_key: str | None) -> None:
        self._key = api_key
        self._token = secrets.token_urlsafe(32)
        self._names = Names()

    def check_origin(self, request: web.BaseRequest) -> None:
        hosts = request.headers.getall("Host", [])
        if not self._names.mean_us(hosts):
            raise Refused(403, "the console answers on localhost only", code="foreign_host")
        own = f"http://{hosts[0]}".lower()
        if any(origin.lower() != own for origin in request.headers.getall("Origin", [])):
            raise Refused(403, "other web pages may not use the console", code="foreign_origin")
        site = request.headers.get("Sec-Fetch-Site")
        if site is not None and site not in _OWN_SITES and not _is_visit(request):
            raise Refused(403, "other web pages may not use the console", code="foreign_origin")

    def check_page(self, request: web.BaseRequest) -> None:
        """Only the page itself holds the token."""
        if not _same(request.headers.get(PAGE_HEADER, ""), self._token):
            raise Refused(
                403, "this needs the page's token", hint="load the page again", code="page_token_missing"
            )

    def session(self, request: web.BaseRequest) -> dict[str, Any]:
        """What the page needs to begin: its token, or that it has to ask for the API key first."""
        if is_of_another_user(request.transport):
            raise Refused(403, "this console belongs to another user of this machine", code="another_user")
        if self._key is None:
            return {"token": self._token, "api_key_needed": False}
        scheme, _, offered = request.headers.get("Authorization", "").partition(" ")
        if not offered:
            return {"token": None, "api_key_needed": True}
        if scheme.lower() != "bearer" or not _same(offered.strip(), self._key):
            raise Refused(401, "this is not the node's API key", code="invalid_api_key")
        return {"token": self._token, "api_key_needed": True}


def _is_visit(request: web.BaseRequest) -> bool:
    """A link to the page, followed from elsewhere: harmless, as the page may not be framed."""
    return (
        request.method == "GET"
        and not request.path.startswith("/api/")
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )


def _same(offered: str, secret: str) -> bool:
    return hmac.compare_digest(offered.encode(errors="surrogateescape"), secret.encode())
