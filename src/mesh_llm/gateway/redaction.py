"""What the engine's answers about itself do not tell: files of its machine, texts of other clients."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

from mesh_llm.gateway.sse import dump


def redacted(path: str, body: bytes) -> bytes:
    """The answer to `path` as anybody may read it. Raises `ValueError` where it makes no sense."""
    document = json.loads(body)
    match path:
        case "/props" if isinstance(document, dict):
            if "model_path" in document:
                document["model_path"] = document.get("model_alias") or ""
        case "/slots" if isinstance(document, list):
            # With its debug option an engine tells these.
            document = [_without(slot, "prompt", "generated") for slot in document]
        case "/lora-adapters" if isinstance(document, list):
            document = [_by_file_name(adapter) for adapter in document]
        case _:
            raise ValueError(f"this is not an answer to {path}")
    return dump(document)


def _without(document: Any, *names: str) -> Any:
    if not isinstance(document, dict):
        return {}
    return {name: value for name, value in document.items() if name not in names}


def _by_file_name(adapter: Any) -> Any:
    told = _without(adapter)
    if "path" in told:
        told["path"] = PurePath(str(told["path"])).name
    return told
