"""One model of the list that the engine gives, as OpenAI's API has it. Pure."""

from __future__ import annotations

import json
from typing import Any

MODELS_PATH = "/v1/models"
_FOLDERS = (f"{MODELS_PATH}/", "/models/")


def model_asked_for(method: str, path: str) -> str | None:
    """The name in `path`, decoded; names of the hub have slashes in them."""
    if method not in ("GET", "HEAD"):
        return None
    for folder in _FOLDERS:
        if path.startswith(folder) and len(path) > len(folder):
            return path.removeprefix(folder)
    return None


def found(name: str, listed: bytes) -> dict[str, Any] | None:
    """The model called `name` in the engine's answer to `MODELS_PATH`."""
    try:
        models = json.loads(listed)["data"]
    except (ValueError, LookupError, TypeError):
        return None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and (model.get("id") == name or name in (model.get("aliases") or ())):
            return model
    return None


def first_name(listed: dict[str, Any]) -> str:
    """What the model is called that the engine answers with."""
    match listed:
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return ""
