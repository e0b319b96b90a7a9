"""Lists of models, and one model of them, as OpenAI's API has it. Pure."""

from __future__ import annotations

import json
from typing import Any

from mesh_llm.gateway.upstream import ModelServing
from mesh_llm.types import State

MODELS_PATH = "/v1/models"
_FOLDERS = (f"{MODELS_PATH}/", "/models/")
_STATUS = {
    State.SERVING: "loaded",
    State.STARTING: "loading",
    State.LOADING: "loading",
}
"""In the words of llama-server, where it serves several; any other state is unloaded."""


def is_list(method: str, path: str) -> bool:
    return method in ("GET", "HEAD") and path in (MODELS_PATH, "/models")


def entry(model: ModelServing, listed: bytes) -> dict[str, Any]:
    """Of one of several; `listed`: what its engine says, if it has one."""
    name, details = model.names[0], model.details()
    told = found(name, listed) or {"id": name, "object": "model", "created": 0, "owned_by": "mesh-llm"}
    aliases = [*(told.get("aliases") or ()), *model.names[1:]]
    gives = {"output_modalities": list(details.gives)}
    abilities = {"input_modalities": list(details.takes), **gives, **_object(told.get("architecture"))}
    if details.gives != ("text",):
        # An engine says that it gives text, whatever it makes.
        abilities |= gives
    return {
        **({"context_length": details.context} if details.context else {}),
        **told,
        "architecture": abilities,
        "aliases": list(dict.fromkeys(aliases)),
        "on_demand": details.on_demand,
        "status": status_of(model),
    }


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def status_of(model: ModelServing) -> dict[str, Any]:
    health = model.health()
    status: dict[str, Any] = {"value": _STATUS.get(health.state, "unloaded"), "args": []}
    if health.state is State.FAILED:
        status["failed"] = True
    return status | ({"reason": health.reason} if health.reason else {})


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
