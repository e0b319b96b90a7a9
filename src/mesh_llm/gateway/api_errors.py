"""Errors in OpenAI's shape, or in Anthropic's and Ollama's under their paths.

The only place that writes one of our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from aiohttp import web

from mesh_llm.gateway.headers import OURS
from mesh_llm.gateway.upstream import Health

GATEWAY_RETRY_AFTER_S = 1
"""Engines come back in seconds: a client that asks once a second costs nothing and loses little."""


_CLOSE = {"Connection": "close"}
_RETRY = {"Retry-After": str(GATEWAY_RETRY_AFTER_S)}
_NAME_SHOWN = 200
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether those who ask there expect errors in Anthropic's shape."""
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


def anthropic_error(status: int, message: str) -> dict[str, object]:
    other = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, other), "message": message}}


def is_ollama(path: str) -> bool:
    """Likewise, in Ollama's."""
    return path.startswith("/api/")


def ollama_error(message: str) -> dict[str, object]:
    return {"error": message}


class ApiError(Exception):
    """Why a request gets no answer from the engine, as its client will read it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | int,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.headers = dict(headers or {})
        self.more = dict(more or {})

    def document(self, path: str = "") -> dict[str, object]:
        """As the API that `path` belongs to has it."""
        if is_anthropic(path):
            return anthropic_error(self.status, self.message)
        if is_ollama(path):
            return ollama_error(self.message)
        error = {"message": self.message, "type": self.kind, "code": self.code}
        return {"error": error, **self.more}

    def body(self, path: str = "") -> bytes:
        return json.dumps(self.document(path)).encode()

    def event(self, path: str = "") -> bytes:
        """The same, for an event stream that is already open."""
        name = b"event: error\n" if is_anthropic(path) else b""
        return name + b"data: " + self.body(path) + b"\n\n"

    def wire(self) -> bytes:
        """A whole answer, for a connection that ends with it."""
        body = self.body()
        headers = {
            **OURS,
            "Content-Type": "application/json; charset=utf-8",
            "Content-Length": str(len(body)),
            **self.headers,
            **_CLOSE,
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def response(self, path: str = "") -> web.Response:
        headers = {**OURS, **self.headers}
        response = web.Response(
            status=self.status, body=self.body(path), content_type="application/json", headers=headers
        )
        if self.headers.get("Connection") == "close":
            response.force_close()
        return response


def not_serving(health: Health) -> ApiError:
    reason = health.reason or "no model is being served right now"
    state = {"state": health.state.value, "reason": reason, "model": health.model}
    return ApiError(503, reason, kind="unavailable_error", code="not_serving", headers=_RETRY, more=state)


def leaving(message: str) -> ApiError:
    return ApiError(503, message, kind="unavailable_error", code="not_serving", headers={**_RETRY, **_CLOSE})


def busy(retry_after_s: int) -> ApiError:
    message = f"too many requests are waiting already; try again in {retry_after_s} s"
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def queue_late(waited_s: float) -> ApiError:
    message = f"the request has waited {waited_s:.3g} s for a slot of the engine"
    return ApiError(503, message, kind="unavailable_error", code="queue_late", headers=_RETRY)


def crowded() -> ApiError:
    message = "too many connections are open already"
    return ApiError(
        503, message, kind="unavailable_error", code="too_many_connections", headers={**_RETRY, **_CLOSE}
    )


def head_late(limit_s: float) -> ApiError:
    message = f"the headers of the request have not arrived within {limit_s:g} s"
    return _refused(408, message, code="header_late")


def head_too_large(message: str) -> ApiError:
    return _refused(431, message, code="header_too_large")


def engine_lost(sentence: str) -> ApiError:
    return ApiError(502, sentence, kind="server_error", code="engine_lost")


def not_resumed(sentence: str) -> ApiError:
    return ApiError(502, sentence, kind="server_error", code="not_resumed")


def engine_gave_up(error: Mapping[str, object]) -> ApiError:
    """In the engine's own words."""
    message, kind, code = (error.get(name) for name in ("message", "type", "code"))
    return ApiError(
        code if isinstance(code, int) and 400 <= code < 600 else 502,
        message if isinstance(message, str) and message else "the engine could not go on",
        kind=kind if isinstance(kind, str) else "server_error",
        code=code if isinstance(code, str | int) else "engine_gave_up",
    )


def engine_silent(silence_s: float) -> ApiError:
    message = f"the engine has sent nothing for {silence_s:g} s"
    return ApiError(504, message, kind="server_error", code="engine_silent")


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"the request body is larger than {limit_bytes / (1 << 20):g} MiB"
    return _refused(413, message, code="body_too_large")


def bodies_full() -> ApiError:
    message = "too many large requests are being read; try again in 1 s"
    return ApiError(503, message, kind="unavailable_error", code="bodies_full", headers={**_CLOSE, **_RETRY})


def body_late(silence_s: float) -> ApiError:
    message = f"nothing more of the request body has arrived for {silence_s:g} s"
    return _refused(408, message, code="body_late")


def bad_request(message: str, *, status: int = 400, code: str = "bad_request") -> ApiError:
    return _refused(status, message, code=code)


def mistake(message: str) -> ApiError:
    """In a request that has been read to its end."""
    return ApiError(400, message, kind="invalid_request_error", code="bad_request")


def no_such_model(name: str, known: Sequence[str] = ()) -> ApiError:
    others = f"these do: {', '.join(known)}" if known else "GET /v1/models lists those that do"
    message = f"the model {name[:_NAME_SHOWN]!r} does not exist; {others}"
    return ApiError(404, message, kind="invalid_request_error", code="model_not_found")


def not_found(method: str, path: str) -> ApiError:
    message = f"{method[:20]} {path[:100]} is not a route of this API"
    return ApiError(404, message, kind="not_found_error", code="not_found")


def not_offered(message: str) -> ApiError:
    return ApiError(400, message, kind="invalid_request_error", code="not_offered")


def not_done(message: str, *, status: int = 400, code: str = "not_done") -> ApiError:
    return ApiError(status, message, kind="invalid_request_error", code=code)


def wrong_key(
    message: str = "this API needs a key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def over_limit(key: str, what: str, limit: int, retry_after_s: int) -> ApiError:
    """In OpenAI's words for it."""
    message = (
        f"the key {key} has used its {limit:,} {what} of today; "
        f"it may ask again in {retry_after_s // 3600} h {retry_after_s % 3600 // 60} min"
    )
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind=what, code="rate_limit_exceeded", headers=headers)


def needs_manage(what: str) -> ApiError:
    message = f"{what} needs a key that may manage: mesh-llm keys add NAME --manage"
    return forbidden(message, code="key_may_not_manage")


def forbidden(message: str, *, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def internal() -> ApiError:
    message = "an internal error of mesh-llm; its log has the details"
    return ApiError(500, message, kind="server_error", code="internal_error", headers=_CLOSE)


def _refused(status: int, message: str, *, code: str) -> ApiError:
    # The rest of such a request may still be on its way: the connection cannot be used again.
    return ApiError(status, message, kind="invalid_request_error", code=code, headers=_CLOSE)
