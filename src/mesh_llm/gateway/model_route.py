"""Which of the node's models a request is for. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from mesh_llm.gateway.model_list import model_asked_for
from mesh_llm.gateway.ollama import SHOW_PATH
from mesh_llm.gateway.upstream import ModelServing

_QUERY = "model"
_FIELD = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_HYPHENS = re.compile("[-_: ]")
_FORM = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n')
"""In a form with files, as transcriptions are asked for."""


def named(method: str, path: str, query: Mapping[str, str], body: bytes, *, is_read: bool) -> str | None:
    """The model that a request names; `is_read`: its body is here, and not too long to be read."""
    if (name := model_asked_for(method, path)) is not None:
        return name
    if query.get(_QUERY):
        return query[_QUERY]
    if body.startswith(b"--"):
        form = _FORM.search(body)
        return form[1].decode("utf-8", "replace").strip() if form is not None else None
    if is_read:
        return _field(body) or (_field(body, "name") if path == SHOW_PATH else None)
    found = _FIELD.search(body)
    return _field(b'{"model":%b}' % found[1]) if found is not None else None


def _field(body: bytes, field: str = "model") -> str | None:
    try:
        document = json.loads(body) if b'"%b"' % field.encode() in body else None
    except ValueError:
        return None  # the engine says what is wrong with it
    name = document.get(field) if isinstance(document, dict) else None
    return name if isinstance(name, str) and name else None


def chosen(models: Sequence[ModelServing], name: str | None) -> ModelServing | None:
    """The model that a name means: all of it, or a beginning that only one has; None: there is none.

    Ollama's clients write `qwen3:8b` and `llama3.2:3b`, and `:latest` where there is no tag.

    Where there is one model, every name means it: clients send what they were made for.
    """
    if name is None or len(models) == 1:
        return models[0]
    bare = name.casefold().removesuffix(":latest")
    # As it is written first: names may differ in their hyphens alone.
    for spelled in (str.casefold, _run_on):
        for model in models:
            if {spelled(name), spelled(bare)} & {*map(spelled, model.names)}:
                return model
    start = _run_on(bare)
    begun = [model for model in models if any(_run_on(each).startswith(start) for each in model.names)]
    return begun[0] if len(begun) == 1 else None


def _run_on(name: str) -> str:
    return _HYPHENS.sub("", name.casefold())
