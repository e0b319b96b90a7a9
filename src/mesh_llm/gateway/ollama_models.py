"""Asks engines for what Ollama's API tells of their models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mesh_llm.gateway import ollama
from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.model_list import MODELS_PATH, found
from mesh_llm.gateway.upstream import ModelServing

Told = Callable[..., Awaitable[tuple[int, bytes]]]
"""Status and body of an engine's answer to a path, and a document if there is one; 0 where none came."""


class OllamaModels:
    def __init__(self, told: Told) -> None:
        self._told = told

    async def listed(self, path: str, models: Sequence[ModelServing]) -> Document:
        """All models; those without an engine are only in the list of what there is."""
        if path == ollama.VERSION_PATH:
            return {"version": ollama.VERSION}
        known = [model for model in models if model.names[0]]
        entries = await asyncio.gather(*map(self._entry, known))
        named = [(model.names[0], told) for model, told in zip(known, entries, strict=True)]
        if path == ollama.PS_PATH:
            return {"models": [ollama.running(name, told) for name, told in named if told]}
        return {"models": [ollama.tag(name, told) for name, told in named]}

    async def shown(self, model: ModelServing) -> Document:
        # An engine that makes none says so before it looks at the texts.
        told, (_, props), (status, _) = await asyncio.gather(
            self._entry(model),
            self._told(model, "/props"),
            self._told(model, "/v1/embeddings", {"input": []}),
        )
        return ollama.shown(told, _object(props), embeds=status == 400)

    async def _entry(self, model: ModelServing) -> Document:
        _, listed = await self._told(model, MODELS_PATH)
        return found(model.names[0], listed) or {}


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
