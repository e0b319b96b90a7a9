"""What of the engine's API is offered, to this node's clients and to other nodes' gateways alike.

Whatever is not listed is not sent on: an engine serves everybody, and some of its routes change it for
everybody, or hand out what is somebody else's.
"""

from __future__ import annotations

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors, ollama
from mesh_llm.gateway.dialects import PATHS as DIALECT_PATHS
from mesh_llm.gateway.model_list import model_asked_for


@frozen
class Route:
    computes: bool = False
    """It takes one of the engine's slots."""
    tokenizes: bool = False
    """It takes no slot, and a processor for as long as its body is."""
    redacted: bool = False
    """The engine's answer holds what is its own machine's business; `redaction` takes it out."""


PLAIN = Route()
"""Costs an engine next to nothing, and tells nothing that is not meant for everybody."""
_COMPUTES = Route(computes=True)
_TOKENIZES = Route(tokenizes=True)
_REDACTED = Route(redacted=True)

_GET = {
    "/health": PLAIN,
    "/v1/health": PLAIN,
    "/metrics": PLAIN,
    "/models": PLAIN,
    "/v1/models": PLAIN,
    "/props": _REDACTED,
    "/slots": _REDACTED,
    "/lora-adapters": _REDACTED,
}
_POST = dict.fromkeys(DIALECT_PATHS, _COMPUTES) | {
    "/v1/embeddings": _COMPUTES,
    "/embeddings": _COMPUTES,
    "/embedding": _COMPUTES,
    "/v1/rerank": _COMPUTES,
    "/rerank": _COMPUTES,
    "/v1/reranking": _COMPUTES,
    "/reranking": _COMPUTES,
    "/v1/audio/transcriptions": _COMPUTES,
    "/audio/transcriptions": _COMPUTES,
    "/v1/systemone": _COMPUTES,
    "/v1/chat/completions/input_tokens": _TOKENIZES,
    "/chat/completions/input_tokens": _TOKENIZES,
    "/v1/responses/input_tokens": _TOKENIZES,
    "/responses/input_tokens": _TOKENIZES,
    "/v1/messages/count_tokens": _TOKENIZES,
    "/apply-template": _TOKENIZES,
    "/tokenize": _TOKENIZES,
    "/detokenize": _TOKENIZES,
    # By the id of an answer under way, which only its own client knows.
    "/v1/chat/completions/control": PLAIN,
}
_OFFERED = {"GET": _GET, "HEAD": _GET, "POST": _POST}
_OLLAMA_LISTS = dict.fromkeys(ollama.LIST_PATHS, PLAIN)
_OLLAMA = {
    "GET": _OLLAMA_LISTS,
    "HEAD": _OLLAMA_LISTS,
    "POST": dict.fromkeys(ollama.COMPUTING_PATHS, _COMPUTES) | {ollama.SHOW_PATH: PLAIN},
}
"""Translated here: the engine has routes of these names, too, which do something else."""

_FOR_EVERYBODY = "this would change the engine for everybody who uses it; set options when you start the node"
_CHOSEN = "models are loaded and unloaded at the node that a client asks, and not at an engine"
_RESUMED = "answers are not kept for a second connection; the node resumes a broken one itself"
_OFF = "the engine's tools and its proxy are not part of this API"
_REFUSED = {
    "/props": _FOR_EVERYBODY,
    "/lora-adapters": _FOR_EVERYBODY,
    "/models/load": _CHOSEN,
    "/models/unload": _CHOSEN,
    "/models/sse": _CHOSEN,
    "/tools": _OFF,
    "/cors-proxy": _OFF,
    "/v1/stream": _RESUMED,
    **ollama.REFUSED,
}
_REFUSED_BELOW = {
    "/slots/": _FOR_EVERYBODY,
    "/v1/stream/": _RESUMED,
    "/v1/streams/": _RESUMED,
    **ollama.REFUSED_BELOW,
}


def route_of(method: str, path: str, *, translated: bool = True) -> Route:
    """Raises the refusal where there is none; `path` is decoded, without the query.

    `translated`: whether those count that the engine is asked for in other words.
    """
    if translated and path in _OLLAMA.get(method, {}):
        return _OLLAMA[method][path]
    offered = _OFFERED.get(method, {})
    if path in offered:
        return offered[path]
    names_model = offered is _GET and path not in _REFUSED and model_asked_for(method, path) is not None
    if names_model and ".." not in path:
        return PLAIN
    below = (sentence for start, sentence in _REFUSED_BELOW.items() if path.startswith(start))
    sentence = _REFUSED.get(path) or next(below, None)
    if sentence is not None:
        raise api_errors.not_offered(sentence)
    raise api_errors.not_found(method, path)
