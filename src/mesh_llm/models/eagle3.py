"""Whether an EAGLE3 head drafts for a model: a layer in a file of its own, which reads three layers of it."""

from __future__ import annotations

from mesh_llm.types import ModelFacts

ARCHITECTURE = "eagle3"
_READ = 3
"""Layers: the engine takes no other number."""
_TARGETS = frozenset({"llama", "qwen3", "qwen3moe", "gpt-oss", "gemma4", "minimax-m2"})
"""Models whose layers the engine hands out (`t_layer_inp` in its graphs); of others it ends itself. Recurrent
and hybrid ones are left out, and so are those that have not been tried."""
_LAST_TOO = frozenset({"gpt-oss"})
"""Of these it also hands out what the last layer makes."""


def mismatch(model: ModelFacts, head: ModelFacts) -> str | None:
    """Why the head does not belong to the model, if that can be seen; vocabularies are another matter."""
    if model.architecture not in _TARGETS:
        return f"the engine does not tell what the layers of a {model.architecture} model read"
    if len(head.read_layers) != _READ:
        return f"its file does not name the {_READ} layers that it reads (eagle3.target_layers)"
    if head.read_width != model.hidden:
        return f"it reads layers of width {head.read_width} instead of {model.hidden}"
    most = len(model.layers) - (0 if model.architecture in _LAST_TOO else 1)
    if max(head.read_layers) > most:
        return f"it reads layer {max(head.read_layers)}, and the last one is {len(model.layers) - 1}"
    return None
