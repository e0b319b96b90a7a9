"""What an engine says against a request, as the API that was asked says it. Pure."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any

from mesh_llm.frozen import frozen
from mesh_llm.gateway.api_errors import anthropic_error, is_anthropic, is_ollama, ollama_error
from mesh_llm.gateway.sse import dump

_MISTAKES = re.compile(
    r"(?:image|audio|video) input is not supported"
    r"|Invalid base64 value|Failed to (?:download|load) image"
    r"|Unsupported param: |Only no echo is supported|\"prompt\" is required|'messages' is required"
    r"|Cannot use both json_schema and grammar"
)
"""Of the client: the engine blames itself for them, and answers 500."""
_TEXT_SHOWN = 500


@frozen
class EngineRefusal:
    status: int
    body: bytes
    is_mistake: bool = False
    """It is the client's, whatever the engine's status said."""
    is_reworded: bool = True
    """Else it is what the engine sent, byte for byte."""
    message: str = ""

    @classmethod
    def read(cls, path: str, status: int, body: bytes) -> EngineRefusal:
        """`status` and `body`: as the engine sent them."""
        error = _error_in(body)
        if error is None:
            error = {"message": " ".join(body.decode(errors="replace").split())[:_TEXT_SHOWN]}
        refusal = cls.of(path, status, error)
        if refusal.is_mistake or _is_reworded(path):
            return refusal
        return cls(status=status, body=body, is_reworded=False)

    @classmethod
    def of(cls, path: str, status: int, error: dict[str, Any]) -> EngineRefusal:
        """`error`: the engine's, which it may tell in a stream that nobody sees, too."""
        is_mistake = status == HTTPStatus.INTERNAL_SERVER_ERROR and bool(
            _MISTAKES.match(str(error.get("message")))
        )
        if is_mistake:
            status = int(HTTPStatus.BAD_REQUEST)
            error = {**error, "code": status, "type": "invalid_request_error"}
        message = str(error.get("message") or _phrase(status))
        if is_anthropic(path):
            document = anthropic_error(status, message)
        elif is_ollama(path):
            document = ollama_error(message)
        else:
            document = {"error": error}
        return cls(status=status, body=dump(document), is_mistake=is_mistake, message=message)


def is_worth_reading(path: str, status: int) -> bool:
    """Whether what the engine says may have to be said in another way."""
    return status >= 400 and (_is_reworded(path) or status == HTTPStatus.INTERNAL_SERVER_ERROR)


def _is_reworded(path: str) -> bool:
    """Errors of its API look otherwise than the engine's."""
    return is_anthropic(path) or is_ollama(path)


def _error_in(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"the engine answered {status}"
