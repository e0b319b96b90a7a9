"""What Ollama's API tells of models, and its embeddings. Pure.

The engine tells of itself in `/v1/models` and `/props`. What it does not tell is left out: the architecture
of a model has no name there, so that the keys of `model_info` begin with another word.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.dialects.ollama import TEXT_PATHS
from mesh_llm.gateway.dialects.ollama_request import text_of
from mesh_llm.gateway.sse import dump

VERSION = "0.12.11"
"""Of Ollama: the one whose API this is. Some clients refuse to talk to an older one."""
TAGS_PATH, PS_PATH, VERSION_PATH, SHOW_PATH = "/api/tags", "/api/ps", "/api/version", "/api/show"
EMBED_PATH, OLD_EMBED_PATH = "/api/embed", "/api/embeddings"
EMBED_PATHS = frozenset({EMBED_PATH, OLD_EMBED_PATH})
LIST_PATHS = frozenset({TAGS_PATH, PS_PATH, VERSION_PATH})
COMPUTING_PATHS = TEXT_PATHS | EMBED_PATHS
OLLAMA_EMBED_INPUTS = 2048
"""Of one request, as many as OpenAI's API takes."""
_FOREVER = timedelta(days=3650)
"""A model stays until its nodes end."""
_ARCHITECTURE = "model"
_NUMBERS = re.compile(rb"\[[-+0-9.eE,\s]*\]")
"""A list of them, in JSON."""
_THINKS = ("<think>", "enable_thinking", "reasoning_content", "reasoning_effort")
"""Some of it is in the template of every model that thinks."""

_MADE = "models are not made through this API; 'mesh-llm load FILE.gguf' serves one that you have"
REFUSED = {
    "/api/pull": "models are not fetched through this API; 'mesh-llm load MODEL' downloads and serves one",
    "/api/push": "models are not published through this API; 'mesh-llm models' shows those on this machine",
    "/api/create": _MADE,
    "/api/copy": "names are not given through this API; 'mesh-llm load MODEL --alias NAME' does that",
    "/api/delete": "models are not removed through this API; 'mesh-llm unload MODEL' serves one no longer",
}
REFUSED_BELOW = {"/api/blobs/": _MADE}


# -- models ----------------------------------------------------------------------------------------


def tag(name: str, told: Document) -> Document:
    """One of the list; `told`: the engine's entry of `/v1/models`, empty where there is no engine."""
    meta = _meta(told)
    # Clients take two names with the same digest for one model, and keep what they know of it by that.
    seen = {**told, "created": 0, "name": name}
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.now(UTC)),
        "size": _number(meta, "size"),
        "digest": hashlib.sha256(json.dumps(seen).encode()).hexdigest(),
        "details": _details(meta),
    }


def running(name: str, told: Document) -> Document:
    """One of those that are loaded."""
    entry = tag(name, told)
    del entry["modified_at"]
    return {
        **entry,
        "expires_at": _time(datetime.now(UTC) + _FOREVER),
        "size_vram": entry["size"],
        "context_length": _number(_meta(told), "n_ctx"),
    }


def shown(told: Document, props: Document, *, embeds: bool) -> Document:
    """All that there is to know of one; `embeds`: its engine makes embeddings."""
    meta = _meta(told)
    template = props.get("chat_template")
    template = template if isinstance(template, str) else ""
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "license": "",
        "modified_at": _time(datetime.now(UTC)),
        "details": _details(meta),
        "model_info": {
            "general.architecture": _ARCHITECTURE,
            "general.parameter_count": _number(meta, "n_params"),
            # What one conversation may have here, and not what the model was trained for.
            f"{_ARCHITECTURE}.context_length": _number(meta, "n_ctx"),
            f"{_ARCHITECTURE}.embedding_length": _number(meta, "n_embd"),
            f"{_ARCHITECTURE}.vocab_size": _number(meta, "n_vocab"),
        },
        "capabilities": _capabilities(props, template, embeds=embeds),
    }


def _capabilities(props: Document, template: str, *, embeds: bool) -> list[str]:
    able = ["completion", *(["embedding"] if embeds else [])]
    if _is_true(props.get("chat_template_caps"), "supports_tools"):
        able.append("tools")
    if any(word in template for word in _THINKS):
        able.append("thinking")
    if _is_true(props.get("modalities"), "vision"):
        able.append("vision")
    return able


def _details(meta: Document) -> Document:
    ftype = meta.get("ftype")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": "",
        "families": [],
        "parameter_size": _parameters(_number(meta, "n_params")),
        "quantization_level": ftype.partition(" - ")[0] if isinstance(ftype, str) else "",
    }


def _parameters(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count) if count else ""


# -- embeddings ------------------------------------------------------------------------------------


def embedding_request(path: str, asked: Document) -> Document:
    """In the engine's words."""
    if path == OLD_EMBED_PATH:
        # It is told as the model makes it, and not scaled to the length of 1.
        return {"input": text_of(asked, "prompt"), "embd_normalize": -1}
    given = asked.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise api_errors.mistake("input must be a text or a list of texts")
    if len(texts) > OLLAMA_EMBED_INPUTS:
        raise api_errors.mistake(f"input may have {OLLAMA_EMBED_INPUTS} texts at most")
    return {"input": texts}


def embedding_answer(path: str, asked: Document, began_s: float, body: bytes) -> bytes:
    """`body`: the engine's. Raises `ValueError` where it makes no sense."""
    # Millions of numbers, which nobody here has to read: they are set aside as they are written.
    aside: list[bytes] = []

    def number_of(written: re.Match[bytes]) -> bytes:
        aside.append(written[0])
        return b"%d" % (len(aside) - 1)

    try:
        answer = json.loads(_NUMBERS.sub(number_of, body))
        entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
        found = [_shortened(aside[int(entry["embedding"])], asked.get("dimensions")) for entry in entries]
        if path == OLD_EMBED_PATH:
            return b'{"embedding":%b}' % found[0]
        told = {
            "model": text_of(asked, "model"),
            "total_duration": max(1, round((time.monotonic() - began_s) * 1e9)),
            "load_duration": 1,
            "prompt_eval_count": int(answer["usage"]["prompt_tokens"]),
        }
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("these are no embeddings") from error
    return b'%b,"embeddings":[%b]}' % (dump(told).removesuffix(b"}"), b",".join(found))


def _shortened(written: bytes, dimensions: Any) -> bytes:
    """The first numbers, scaled to the length of 1 again; all of them as they are where none is too many."""
    if not isinstance(dimensions, int) or not 0 < dimensions <= written.count(b","):
        return written
    values = json.loads(written)[:dimensions]
    length = math.hypot(*values) or 1.0
    return dump([value / length for value in values])


# -- values that an engine may have told -----------------------------------------------------------


def _meta(told: Document) -> Document:
    meta = told.get("meta")
    return meta if isinstance(meta, dict) else {}


def _number(meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def _is_true(told: Any, name: str) -> bool:
    return isinstance(told, dict) and told.get(name) is True


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
