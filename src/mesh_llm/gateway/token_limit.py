"""What a key with a limit on tokens may not ask: the answer would not tell all that it costs.

The engine tells the tokens of each prompt alone, and of several answers those of one, unless they are
counted as they come. Some of its answers tell none.
"""

from __future__ import annotations

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.dialects import dialect_of
from mesh_llm.gateway.dialects.base import is_several, prompts_of
from mesh_llm.gateway.request_body import RequestBody
from mesh_llm.gateway.text_request import TextRequest, read_document

_TELL_NONE = frozenset({"/embedding", "/embeddings"})
_RERANK = frozenset({"/rerank", "/v1/rerank", "/reranking", "/v1/reranking"})


def check(path: str, body: RequestBody, generation: TextRequest | None, *, read_bytes: int) -> None:
    """Raises the refusal, if there is one. `read_bytes`: no larger body is read."""
    if path in _TELL_NONE:
        raise _refusal(f"{path} does not report any; ask /v1/embeddings")
    if dialect_of(path) is None and path not in _RERANK:
        return
    # Nobody knows what is asked in a longer one: several answers, perhaps.
    body.require(read_bytes)
    document = generation.body if generation is not None else read_document(body.start)
    if path in _RERANK and "texts" in document:
        raise _refusal('the answer to "texts" reports none; send "documents"')
    if document.get("response_fields"):
        raise _refusal("single fields of an answer may not report them; leave response_fields out")
    if prompts_of(document) > 1 or (generation is None and is_several(document)):
        raise _refusal("several answers in one do not report all of them; send a request for each prompt")


def _refusal(why: str) -> api_errors.ApiError:
    return api_errors.mistake(f"this key has a limit on tokens, and {why}")
