"""The APIs in which a client may ask for text, and how each of them is answered.

All of them end in the same engine. They differ in what a request is called and how the events of its
answer look, and so in what it takes to continue an answer after the engine that began it is gone.

    base        what all of them have in common
    chat        /v1/chat/completions
    completion  /v1/completions, and llama-server's own /completion
    messages    Anthropic's /v1/messages
    responses   OpenAI's /v1/responses
    ollama      Ollama's /api/chat and /api/generate
    choices     answers with several choices

    ollama_request  requests of Ollama's API, in the words of the engine's
"""

from __future__ import annotations

from mesh_llm.gateway.dialects.base import Dialect, Said
from mesh_llm.gateway.dialects.chat import Chat
from mesh_llm.gateway.dialects.completion import Completion, Native
from mesh_llm.gateway.dialects.messages import Messages
from mesh_llm.gateway.dialects.responses import Responses

_CHAT, _COMPLETION, _NATIVE, _MESSAGES, _RESPONSES = Chat(), Completion(), Native(), Messages(), Responses()

_BY_PATH: dict[str, Dialect] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/completion": _NATIVE,
    "/completions": _NATIVE,
    "/infill": _NATIVE,
    "/v1/messages": _MESSAGES,
    "/v1/responses": _RESPONSES,
    "/responses": _RESPONSES,
}

PATHS = frozenset(_BY_PATH)


def dialect_of(path: str) -> Dialect | None:
    """None where `path` asks for no text."""
    return _BY_PATH.get(path)


__all__ = ["PATHS", "Dialect", "Said", "dialect_of"]
