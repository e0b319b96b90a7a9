"""Tiny models whose next token is the last one plus a step, so that what is right to draft is known.

Embeddings go round in circles, a step is a rotation of them, and layers add next to nothing. A head for
further tokens (MTP) reads the state of the token before, and rotates it once more: always right, or
always wrong. EAGLE3 heads are files of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.architectures import COMMON, LAYERS, MODELS, VOCABULARY, Metadata
from tests.support.engine_lab import EngineLab, Tiny, random_values

PERIOD = 8
"""Tokens until a text repeats itself, where it is to."""
NEVER = 512
"""Longer than any answer."""
_ADDED = 0.01
"""What a layer adds to its input, as a share of what random weights would add."""
_SURE = 0.25
"""Of the likeliest token, in logits for each element of a state."""
_WRITERS = ("attn_output", "ffn_down", "ssm_out", "out_proj", "time_mix_output", "channel_mix_value")


def write(lab: EngineLab, architecture: str, *, period: int = PERIOD, sizes: Metadata | None = None) -> Tiny:
    """Without a head for further tokens. `sizes`: metadata of a larger model."""
    metadata = MODELS[architecture] | (sizes or {})
    weights = _trunk(_shapes(lab, architecture, metadata), _step(period))
    return lab.write_weights(architecture, metadata, weights, stem=f"{architecture}-{period}")


def write_with_head(lab: EngineLab, architecture: str, *, right: bool, sizes: Metadata | None = None) -> Tiny:
    """With one behind the last layer. `sizes`: metadata of a larger model."""
    plain = MODELS[architecture] | (sizes or {})
    step = _step(NEVER)
    shapes = _shapes(lab, architecture, plain)
    layers = plain.get("block_count", LAYERS)
    weights = _trunk(shapes, step) | _head(shapes, layers, step if right else -step)
    name = f"{architecture}-{'right' if right else 'wrong'}"
    return lab.write_weights(architecture, _with_head(architecture, plain, layers), weights, stem=name)


READ = (1, 3, 5)
"""Layers whose inputs an EAGLE3 head reads."""
_SELF = 3.0
"""What queries and keys of an EAGLE3 head are multiplied by: enough that a token attends to itself."""


def write_eagle3(
    lab: EngineLab,
    *,
    right: bool = True,
    by_layers: bool = False,
    sizes: Metadata | None = None,
    metadata: Metadata | None = None,
) -> Tiny:
    """A head for a model whose text never repeats itself (`write` with NEVER).

    By the token that it is given, as many in a row as anybody wants; `by_layers`: by what the third of its
    layers read, which is right for one token, and with the model's own output head.

    `sizes`: the model's own, if they are not the usual ones; `metadata`: of the head alone.
    """
    step = _step(NEVER) if right else -_step(NEVER)
    model = COMMON | (sizes or {})
    hidden, ffn = model["embedding_length"], model["feed_forward_length"]
    zero, one, ones = np.zeros((hidden, hidden)), np.eye(hidden), np.ones(hidden)
    circles = _circles(VOCABULARY, hidden)
    token = np.concatenate([one, zero], axis=1)
    weights = {
        "fc.weight": np.concatenate([zero, zero, _rotation(hidden, step)], axis=1),
        "output_norm.weight": ones,
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_norm_2.weight": ones,
        "blk.0.attn_q.weight": _SELF * token,
        "blk.0.attn_k.weight": _SELF * token,
        "blk.0.attn_v.weight": token,
        "blk.0.attn_output.weight": zero if by_layers else 100 * one,
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": np.zeros((ffn, hidden)),
        "blk.0.ffn_up.weight": np.zeros((ffn, hidden)),
        "blk.0.ffn_down.weight": np.zeros((hidden, ffn)),
    }
    if not by_layers:
        weights["output.weight"] = np.roll(circles, step, axis=0) * _SURE
    own = (sizes or {}) | {"block_count": 1, "attention.head_count_kv": model["attention.head_count"]}
    own |= {"target_layers": list(READ), "target_hidden_size": hidden}
    own["norm_before_residual"] = not by_layers
    name = f"eagle3-{'layers' if by_layers else 'token'}-{'right' if right else 'wrong'}"
    own = {key: value for key, value in (own | (metadata or {})).items() if value is not None}
    floats = {name: values.astype(np.float32) for name, values in weights.items()}
    return lab.write_weights("eagle3", own, floats, stem=name)


def orbit(first: int, count: int, *, period: int) -> list[int]:
    """What a model says after `first`."""
    return [(first + index * _step(period)) % VOCABULARY for index in range(count)]


def _shapes(lab: EngineLab, architecture: str, metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Without what the loader takes from some files and not of each layer."""
    wanted = lab.shapes(architecture, metadata)
    return {name: shape for name, shape in wanted.items() if "scale" not in name and "cls." not in name}


def _step(period: int) -> int:
    return 37 if period == NEVER else VOCABULARY // period


def _with_head(architecture: str, metadata: Metadata, layers: int) -> Metadata:
    heads = metadata.get("attention.head_count_kv")
    more = {"attention.head_count_kv": [*heads, max(heads)]} if isinstance(heads, list) else {}
    flat = {"rope.dimension_sections": [0] * 4} if architecture == "glm4moe" else {}
    return metadata | more | flat | {"block_count": layers + 1, "nextn_predict_layers": 1}


def _trunk(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, Any]:
    weights = {name: random_values(name, shape) for name, shape in shapes.items()}
    for name, values in weights.items():
        if any(part in name for part in _WRITERS):
            weights[name] = values * np.float32(_ADDED)
    vocabulary, hidden = shapes["token_embd.weight"]
    circles = _circles(vocabulary, hidden)
    norm = "output_norm.weight" if "output_norm.weight" in shapes else "token_embd_norm.weight"
    ends = {
        "token_embd.weight": circles,
        norm: np.ones(hidden, np.float32),
        # A token is likely where its embedding is the last one's, one step on.
        "output.weight": np.roll(circles, step, axis=0) * np.float32(_SURE),
    }
    return weights | ends


def _head(shapes: dict[str, tuple[int, ...]], layer: int, step: int) -> dict[str, Any]:
    """A layer like the last one with attention, over the state that the step's rotation has turned."""
    like = next(name for name in reversed(shapes) if name.endswith("attn_output.weight")).split(".")[1]
    prefix = f"blk.{layer}."
    weights = {}
    for name, shape in shapes.items():
        if name.startswith(f"blk.{like}."):
            own = name.replace(f"blk.{like}.", prefix, 1)
            damped = _ADDED if any(part in name for part in _WRITERS) else 1.0
            weights[own] = random_values(own, shape) * np.float32(damped)
    _, hidden = shapes["token_embd.weight"]
    ones = np.ones(hidden, np.float32)
    turned = np.concatenate([np.zeros((hidden, hidden), np.float32), _rotation(hidden, step)], axis=1)
    return weights | {
        f"{prefix}nextn.eh_proj.weight": turned,
        f"{prefix}nextn.enorm.weight": ones,
        f"{prefix}nextn.hnorm.weight": ones,
        f"{prefix}nextn.shared_head_norm.weight": ones,
    }


def _angles(hidden: int, step: float) -> Any:
    """By which each pair of elements turns in so many steps of one token."""
    turns = np.random.default_rng(5).permutation(np.resize(np.arange(1, VOCABULARY // 2), hidden // 2))
    return 2 * np.pi * turns * step / VOCABULARY


def _circles(vocabulary: int, hidden: int) -> Any:
    angles = np.stack([_angles(hidden, token) for token in range(vocabulary)])
    pairs = np.stack([np.cos(angles), np.sin(angles)], axis=2) * np.sqrt(2)
    return pairs.reshape(vocabulary, hidden).astype(np.float32)


def _rotation(hidden: int, step: int) -> Any:
    matrix = np.zeros((hidden, hidden), np.float32)
    for pair, angle in enumerate(_angles(hidden, step)):
        at = slice(2 * pair, 2 * pair + 2)
        matrix[at, at] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return matrix
