"""Text that others had a say in, made fit for a terminal, a page and a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME_CHARS = 128
"""Of names of nodes, models and devices."""
SENTENCE_CHARS = 400
_LINE_CHARS = 2000


def clean(text: str, limit: int) -> str:
    """Short, and without what would move somebody's cursor."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:limit])


def line(text: str) -> str:
    """A sentence of our own that may quote others, or an engine that does."""
    return clean(text, _LINE_CHARS)


def refusal(document: Mapping[str, Any], otherwise: str) -> str:
    """Why another node does not do what it was asked for."""
    reason = document.get("refused")
    return (clean(reason, SENTENCE_CHARS) if isinstance(reason, str) else "") or otherwise
