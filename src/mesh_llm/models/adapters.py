"""LoRA adapters: whether a file is one, and goes with a model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_llm.errors import ModelError

_A, _B, _NORM = ".lora_a", ".lora_b", "_norm.weight"
_CONVERT = "adapters are made with llama.cpp's convert_lora_to_gguf.py"
_ANOTHER = "take an adapter that was made for this model"


def check_adapter(path: Path, adapter: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise where the engine would refuse it; both are what `engine/children/gguf.py` printed."""
    told, base = adapter["metadata"], model["metadata"].get("general.architecture")
    if told.get("general.type") != "adapter" or told.get("adapter.type") != "lora":
        raise ModelError(f"--lora {path}: this is not a LoRA adapter", hint=_CONVERT)
    if told.get("general.architecture") != base:
        made_for = told.get("general.architecture")
        raise ModelError(f"--lora {path}: it is for {made_for}, and the model is {base}", hint=_ANOTHER)
    shapes = {row[0]: row[2] for row in adapter["tensors"] if not row[0].endswith(_NORM)}
    models = {row[0]: row[2] for row in model["tensors"]}
    for name in shapes:
        changed = name.removesuffix(_A).removesuffix(_B)
        if changed == name:
            raise ModelError(f"--lora {path}: {name} is no tensor of a LoRA adapter", hint=_CONVERT)
        if changed not in models:
            raise ModelError(f"--lora {path}: the model has no tensor {changed}", hint=_ANOTHER)
        a, b = shapes.get(changed + _A), shapes.get(changed + _B)
        if a is None or b is None or not _fits(changed, a, b, models[changed]):
            raise ModelError(f"--lora {path}: its {changed} does not fit the model's", hint=_ANOTHER)


def _fits(name: str, a: list[int], b: list[int], model: list[int]) -> bool:
    """As llama.cpp checks it: inner length first."""
    if min(map(len, (a, b, model))) < 2:
        return False
    if name.endswith("token_embd.weight"):
        return model[0] == b[1] and model[1] == a[1]
    return model[0] == a[0] and model[1] == b[1] and a[1] == b[0]
