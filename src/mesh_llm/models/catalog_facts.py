"""From an entry of the catalog to the facts that planning needs, before the file is here. No I/O.

An entry with a `shape` is written out as a header would be: the same keys, and a table of tensors
whose bytes are the entry's size, shared out by their elements. So what each layer caches is exact, and
what each layer weighs is right to some percent. An entry without one is taken to have equal layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_llm.models.catalog import CatalogEntry
from mesh_llm.models.facts import model_facts
from mesh_llm.models.header_cache import NO_FINGERPRINT
from mesh_llm.types import Layer, LayerCache, ModelFacts

_TYPES = {"MXFP4": "mxfp4", "MXFP4_MOE": "mxfp4", "BF16": "bf16", "F16": "f16", "F32": "f32"}
_ROUGH_LAYERS = 32
"""Of an entry that does not tell: about what most have."""
_ROUGH_CONTEXT = 8192
"""Tokens whose cache is in an entry's `memory_bytes`."""
_F16_BYTES = 2

Row = tuple[str, list[int]]
"""A tensor's name, and its shape."""


def facts_of(entry: CatalogEntry) -> ModelFacts | None:
    """From its shape; None where it has none, and the file's header has to be read."""
    if not entry.shape or not entry.size_bytes or not entry.layers or not entry.architecture:
        return None
    by_layer = [_of_layer(entry, layer) for layer in range(entry.layers)]
    rows = [*_around(by_layer), *(row for layer, keys in enumerate(by_layer) for row in _layer(keys, layer))]
    elements = sum(math.prod(shape) for _, shape in rows)
    kind, each = _type(entry.quantisation), entry.size_bytes / elements
    return model_facts(
        {
            "metadata": _metadata(entry),
            "tensors": [[name, kind, shape, int(each * math.prod(shape))] for name, shape in rows],
            "files": [{"path": name, "bytes": size} for name, size in _files(entry)],
            "fingerprint": NO_FINGERPRINT,
        }
    )


def rough_facts(entry: CatalogEntry) -> ModelFacts | None:
    """With equal layers, for a first estimate; None where not even a size is known."""
    size = entry.size_bytes or entry.memory_bytes
    if not size:
        return None
    layers = entry.layers or _ROUGH_LAYERS
    cells = layers * _ROUGH_CONTEXT * _F16_BYTES
    width = max(0, entry.memory_bytes - size) // (2 * cells)
    layer = Layer(weight_bytes=size // layers, cache=LayerCache(k_width=width, v_width=width))
    return ModelFacts(
        files=tuple(Path(name) for name in entry.files),
        fingerprint=NO_FINGERPRINT,
        size_bytes=size,
        name=entry.name,
        architecture=entry.architecture,
        quantisation=entry.quantisation,
        layers=(layer,) * layers,
        context_trained=entry.context or _ROUGH_CONTEXT,
        causal=True,
        pooled=False,
        chat_template=None,
        embedding_bytes=0,
        head_bytes=0,
        other_bytes=0,
        hidden=0,
        feed_forward=0,
        heads=0,
        vocabulary=0,
        experts=0,
        experts_used=0,
        expert_feed_forward=0,
        query_elements=0,
        widest=0,
    )


def _of_layer(entry: CatalogEntry, layer: int) -> dict[str, int]:
    """Its keys, as they hold for one layer."""
    return {key: size if isinstance(size, int) else size[layer % len(size)] for key, size in entry.shape}


def _metadata(entry: CatalogEntry) -> dict[str, Any]:
    own: dict[str, Any] = {"block_count": entry.layers, "context_length": entry.context}
    for key, size in entry.shape:
        own[key] = size if isinstance(size, int) else [size[at % len(size)] for at in range(entry.layers)]
    return {
        "general.architecture": entry.architecture,
        "general.name": entry.name,
        **{f"{entry.architecture}.{key}": value for key, value in own.items()},
    }


def _files(entry: CatalogEntry) -> Iterator[tuple[str, int]]:
    for index, name in enumerate(entry.files):
        yield name, 0 if index else entry.size_bytes


def _type(quantisation: str) -> str:
    """ggml's type of most weights: q4_K of Q4_K_M."""
    name = quantisation.upper().removeprefix("UD-")
    if name in _TYPES:
        return _TYPES[name]
    kind, _, rest = name.lower().partition("_")
    if rest.startswith("k"):
        return f"{kind}_K"
    return f"{kind}_{rest.split('_')[0]}" if rest else "q4_K"


def _around(layers: list[dict[str, int]]) -> Iterator[Row]:
    keys = layers[0]
    shape = [keys["embedding_length"], keys["vocab_size"]]
    yield "token_embd.weight", shape
    if not keys.get("tied", 0):
        yield "output.weight", shape
    if width := keys.get("embedding_length_per_layer_input", 0):
        yield "per_layer_token_embd.weight", [width * len(layers), keys["vocab_size"]]


def _layer(keys: dict[str, int], layer: int) -> Iterator[Row]:
    interval = keys.get("full_attention_interval", 0)
    recurs = keys.get("attention.head_count_kv") == 0 or (interval and (layer + 1) % interval)
    mixed = _recurrent(keys) if recurs else _attention(keys)
    for name, shape in (*mixed, *_feed_forward(keys, layer)):
        yield f"blk.{layer}.{name}.weight", shape


def _head_sizes(keys: dict[str, int]) -> tuple[int, int]:
    """Of a key and of a value, which may be others where attention looks back on a window alone."""
    kind = "_swa" if keys.get("attention.sliding_window_pattern", 0) else ""
    usual = keys["embedding_length"] // keys["attention.head_count"]
    key = keys.get(f"attention.key_length{kind}") or keys.get("attention.key_length") or usual
    return key, keys.get(f"attention.value_length{kind}") or keys.get("attention.value_length") or key


def _attention(keys: dict[str, int]) -> Iterator[Row]:
    hidden, heads = keys["embedding_length"], keys["attention.head_count"]
    key, value = _head_sizes(keys)
    if rank := keys.get("attention.kv_lora_rank", 0):
        cached, queries = key, keys.get("attention.q_lora_rank", 0)
        key, value = keys["attention.key_length_mla"], keys["attention.value_length_mla"]
        if queries:
            yield "attn_q_a", [hidden, queries]
        yield "attn_q_b", [queries or hidden, heads * key]
        yield "attn_kv_a_mqa", [hidden, cached]
        yield "attn_kv_b", [rank, heads * (key - cached + rank + value)]
    else:
        shared = keys.get("attention.head_count_kv", heads)
        yield "attn_q", [hidden, heads * key]
        yield "attn_k", [hidden, shared * key]
        yield "attn_v", [hidden, shared * value]
    yield "attn_output", [heads * value, hidden]


def _recurrent(keys: dict[str, int]) -> Iterator[Row]:
    hidden, inner = keys["embedding_length"], keys["ssm.inner_size"]
    states = 2 * keys.get("ssm.group_count", 1) * keys["ssm.state_size"]
    yield "attn_qkv", [hidden, inner + states]
    yield "attn_gate", [hidden, inner]
    yield "ssm_out", [inner, hidden]


def _feed_forward(keys: dict[str, int], layer: int) -> Iterator[Row]:
    hidden, experts = keys["embedding_length"], keys.get("expert_count", 0)
    if not experts or layer < keys.get("leading_dense_block_count", 0):
        yield from _products("", hidden, keys["feed_forward_length"], gated=keys.get("gated", 1))
        return
    width = keys["expert_feed_forward_length"]
    shared = keys.get("expert_shared_feed_forward_length") or keys.get("expert_shared_count", 0) * width
    yield "ffn_gate_inp", [hidden, experts]
    yield from _products("_exps", hidden, width, experts)
    if shared:
        yield from _products("_shexp", hidden, shared)


def _products(kind: str, hidden: int, width: int, *experts: int, gated: int = 1) -> Iterator[Row]:
    if gated:
        yield f"ffn_gate{kind}", [hidden, width, *experts]
    yield f"ffn_up{kind}", [hidden, width, *experts]
    yield f"ffn_down{kind}", [width, hidden, *experts]
