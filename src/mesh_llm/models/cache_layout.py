"""What each layer of a model keeps per sequence, as llama.cpp build 11549 allocates it.

Follows `llama_model::create_memory` and the `load_arch_hparams` of each
architecture. Where an architecture is not known, every layer counts as plain
attention over the whole context: too much memory asked for is an annoyance,
too little is a crash.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.models.metadata import Metadata
from mesh_llm.types import LayerCache


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_F32_BYTES = 4
_INTERVAL_LIMIT = 512

ENCODERS = _names(
    "bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding "
    "gemma-embedding2"
)
"""They make embeddings, and no text."""
WITHOUT_CACHE = ENCODERS | _names("wavtokenizer-dec dream llada llada-moe rnd1 clef")
"""Encoders and diffusion models: they see the whole input at once and remember nothing."""

_RECURRENT = _names("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7")
_RECURRENT_WITHOUT_KV_HEADS = _names(
    "jamba plamo2 granitehybrid lfm2 lfm2moe kimi-linear kimi-k3 glm5-next bailingmoe3"
)
_RECURRENT_BETWEEN = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Every n-th layer is attention and those between are recurrent."""
_FEED_FORWARD_LAYERS = frozenset({"nemotron_h", "nemotron_h_moe"})
"""A layer is one of attention, recurrence or feed-forward, not a pair."""
_WITHOUT_GROUPS = frozenset({"mamba", "jamba"})
"""State-space models of the first kind: the engine does not read their group count."""

_MLA = _names(
    "deepseek2 mistral4 deepseek32 glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear bailingmoe3 dots3note"
)
_INDEXED = _names("deepseek32 glm-dsa glm5-next hy_v4 dots3note minimax-m3 qwen4exp")
"""Sparse attention: one more key per cell, by which cells are chosen."""

_MTP = _names("qwen3next qwen35 qwen35moe glm4moe deepseek2 deepseek32 glm-dsa hy_v3 cohere2moe")
"""With an MTP head: a layer behind the last one that drafts, from the state that the output head reads.
Those of mimo2, step35, deepseek4 and qwen4exp read it from the last layer, wherever that lies; those of
glm5-next, bailingmoe3 and nemotron_h_moe have not been tried."""
SNAPSHOTS = _names("qwen35 qwen35moe")
"""Of these, recurrent ones of which the engine keeps the states of the last tokens
(`llm_arch_supports_rs_rollback`)."""


@frozen
class _Sliding:
    """How an architecture mixes sliding-window layers with global ones.

    Every `period`-th layer is global: the last of each group, or the first.
    A `period` of 0 means that the file has to say it layer by layer.
    """

    period: int = 0
    global_first: bool = False
    window: int = 0
    """What the engine assumes where the file says nothing; 0: no window then."""
    fixed_window: int = 0
    """What the engine takes instead of the file's window, unless that is 0."""


_SLIDING = {
    "afmoe": _Sliding(period=4),
    "cohere2": _Sliding(period=4),
    "cohere2moe": _Sliding(period=4, global_first=True),
    "dots3note": _Sliding(),
    "exaone-moe": _Sliding(period=4),
    "exaone4": _Sliding(period=4, window=4096),
    "gemma2": _Sliding(period=2, window=4096),
    "gemma3": _Sliding(period=6),
    "gemma3n": _Sliding(period=5),
    "gemma4": _Sliding(),
    "gpt-oss": _Sliding(period=2),
    "granite_swa": _Sliding(),
    "laguna": _Sliding(period=4, global_first=True),
    "llama4": _Sliding(period=4, window=8192, fixed_window=8192),
    "maple": _Sliding(),
    "mellum": _Sliding(period=4),
    "mimo2": _Sliding(),
    "muse-glimmer": _Sliding(period=4),
    "olmo2": _Sliding(period=4),
    "plamo3": _Sliding(period=8),
    "smallthinker": _Sliding(period=4, global_first=True, fixed_window=4096),
    "spark2_5": _Sliding(),
    "step35": _Sliding(),
}
_EXAONE4_SLIDING_LAYERS = 64
"""Only the 32B of that family slides, and the engine knows it by its layers."""
_GEMMA3N_CACHED_LAYERS = 20
_READ_BY_SHARED = 2
"""The last layer with a sliding window, and the last one without."""
_NEVER_SPLIT = {"graniteswitch"}
"""It chooses adapters for all layers by a cache that the engine puts behind the last one."""


def layer_caches(keys: Metadata, *, layers: int, hidden: int) -> tuple[LayerCache, ...]:
    if keys.architecture in WITHOUT_CACHE:
        return (LayerCache(),) * layers
    trunk = layers - _predicting_layers(keys, layers)
    recurrent = _recurrent_layers(keys, layers)
    windows = _windows(keys, layers, recurrent)
    state_bytes = _state_bytes(keys, layers, hidden) if any(recurrent) else 0
    caches = _attention_caches(keys, layers, hidden, windows, recurrent)
    both = keys.architecture == "falcon-h1"
    for index, is_recurrent in enumerate(recurrent):
        if is_recurrent:
            kept = caches[index] if both else LayerCache()
            caches[index] = replace(kept, state_bytes=state_bytes)
    # Layers that guess further tokens are loaded, but nothing attends to them without speculation.
    return tuple(caches[:trunk]) + (LayerCache(),) * (layers - trunk)


def mtp_cache(keys: Metadata, *, layers: int, hidden: int) -> LayerCache | None:
    """Of the MTP head, a layer behind the last one that drafts further tokens; None where it is not used."""
    if keys.architecture not in _MTP or _predicting_layers(keys, layers) != 1:
        return None
    if keys.architecture == "glm4moe" and keys.has("rope.dimension_sections"):
        return None  # one that sees: the engine ends itself over its positions
    return _attention_caches(keys, layers, hidden, (0,) * layers, (False,) * layers)[-1]


def query_elements(keys: Metadata, *, layers: int, hidden: int) -> int:
    """Elements per token of the queries while attention runs: as projected, and again as rotated.

    Compressed attention holds them three times: projected, taken into the
    width of the cache, and joined there with their rotated part.
    """
    if not keys.has("attention.head_count") or max(_heads(keys, layers)) == 0:
        return 0
    key, _ = _head_sizes(keys, layers, hidden)
    heads = max(_heads(keys, layers))
    if _is_mla(keys):
        return heads * (keys.number("attention.key_length_mla") + 2 * key)
    return 2 * heads * max(key, keys.number("attention.key_length_swa", default=0))


def _predicting_layers(keys: Metadata, layers: int) -> int:
    count = keys.number("nextn_predict_layers", default=0, maximum=layers)
    return 0 if count == layers else count


def _recurrent_layers(keys: Metadata, layers: int) -> tuple[bool, ...]:
    architecture = keys.architecture
    if architecture in _RECURRENT or architecture == "falcon-h1":
        return (True,) * layers
    if architecture in _RECURRENT_WITHOUT_KV_HEADS:
        return tuple(heads == 0 for heads in _kv_heads(keys, layers))
    if architecture in _FEED_FORWARD_LAYERS:
        widths = keys.per_layer("feed_forward_length", layers, default=0)
        pairs = zip(_kv_heads(keys, layers), widths, strict=True)
        return tuple(heads == 0 and width == 0 for heads, width in pairs)
    if architecture in _RECURRENT_BETWEEN:
        told = keys.flags("attention.recurrent_layers", layers)
        if told is not None:
            return told
        default = _RECURRENT_BETWEEN[architecture]
        interval = keys.number("full_attention_interval", default=default, minimum=1, maximum=_INTERVAL_LIMIT)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    return (False,) * layers


def _windows(keys: Metadata, layers: int, recurrent: tuple[bool, ...]) -> tuple[int, ...]:
    """Cells that each layer looks back on; 0 for the whole context."""
    if keys.architecture == "lfm2":
        window = keys.number("attention.sliding_window", default=0)
        return tuple(0 if is_recurrent else window for is_recurrent in recurrent)
    rule = _SLIDING.get(keys.architecture)
    if rule is None or (keys.architecture == "exaone4" and layers != _EXAONE4_SLIDING_LAYERS):
        return (0,) * layers
    window = keys.number("attention.sliding_window", default=rule.window)
    if window and rule.fixed_window:
        window = rule.fixed_window
    sliding = keys.flags("attention.sliding_window_pattern", layers)
    if sliding is None:
        sliding = _periodic(keys, rule, layers)
    return tuple(window if slides else 0 for slides in sliding)


def _periodic(keys: Metadata, rule: _Sliding, layers: int) -> tuple[bool, ...]:
    if rule.period == 0:
        return (False,) * layers
    period = keys.number("attention.sliding_window_pattern", default=rule.period, maximum=_INTERVAL_LIMIT)
    if period == 0:
        return (True,) * layers
    if rule.global_first:
        return tuple(index % period != 0 for index in range(layers))
    return tuple(index % period < period - 1 for index in range(layers))


def _attention_caches(
    keys: Metadata, layers: int, hidden: int, windows: tuple[int, ...], recurrent: tuple[bool, ...]
) -> list[LayerCache]:
    if all(recurrent) and keys.architecture != "falcon-h1":
        return [LayerCache()] * layers
    key, value = _head_sizes(keys, layers, hidden)
    key_sliding = keys.number("attention.key_length_swa", default=key)
    value_sliding = keys.number("attention.value_length_swa", default=value)
    compressed = _is_mla(keys)
    indexer = _indexer_width(keys)
    loops = _loops(keys)
    caches = []
    for heads, window in zip(_cached_heads(keys, layers), windows, strict=True):
        k_width = heads * (key_sliding if window else key) * loops
        v_width = 0 if compressed else heads * (value_sliding if window else value) * loops
        if indexer and heads and not window:
            k_width += indexer
            v_width += 0 if compressed else value
        caches.append(LayerCache(k_width=k_width, v_width=v_width, window=window))
    return caches


def _loops(keys: Metadata) -> int:
    """Times that the layers are gone through, each time with a cache of its own."""
    if keys.architecture != "nanbeige":
        return 1
    return keys.number("num_loops", default=1, minimum=1, maximum=_INTERVAL_LIMIT)


def _cached_heads(keys: Metadata, layers: int) -> tuple[int, ...]:
    """Key-value heads of every layer that has a cache of its own, 0 for the others."""
    heads = _kv_heads(keys, layers)
    if keys.architecture in _FEED_FORWARD_LAYERS:
        widths = keys.per_layer("feed_forward_length", layers, default=0)
        return tuple(0 if width else count for count, width in zip(heads, widths, strict=True))
    shared = _shared_layers(keys, layers)
    return heads[: layers - shared] + (0,) * shared


def _shared_layers(keys: Metadata, layers: int) -> int:
    """So many of the last layers have no cache of their own, and read those of the two before them."""
    if keys.architecture == "gemma3n":
        return max(0, layers - _GEMMA3N_CACHED_LAYERS)
    if keys.architecture == "gemma4":
        return keys.number("attention.shared_kv_layers", default=0, maximum=layers)
    return 0


def joined_layers(keys: Metadata, layers: int) -> int:
    """So many of the last layers cannot be parted: a whole cache would cross a link for every token."""
    if keys.architecture in _NEVER_SPLIT:
        return layers
    shared = _shared_layers(keys, layers)
    return min(layers, shared + _READ_BY_SHARED) if shared else 0


def _heads(keys: Metadata, layers: int) -> tuple[int, ...]:
    return keys.per_layer("attention.head_count", layers)


def _kv_heads(keys: Metadata, layers: int) -> tuple[int, ...]:
    if keys.has("attention.head_count_kv"):
        return keys.per_layer("attention.head_count_kv", layers)
    return _heads(keys, layers)


def _head_sizes(keys: Metadata, layers: int, hidden: int) -> tuple[int, int]:
    """Elements of one key and of one value."""
    heads = next((count for count in _heads(keys, layers) if count), 0)
    if heads == 0:
        keys.damaged(f"its {keys.architecture}.attention.head_count is 0")
    size = hidden // heads
    return (
        keys.number("attention.key_length", default=size),
        keys.number("attention.value_length", default=size),
    )


def _is_mla(keys: Metadata) -> bool:
    return (
        keys.architecture in _MLA
        and keys.number("attention.key_length_mla", default=0) > 0
        and keys.number("attention.value_length_mla", default=0) > 0
    )


def _indexer_width(keys: Metadata) -> int:
    if keys.architecture not in _INDEXED:
        return 0
    return keys.number("attention.indexer.key_length", default=0)


def _state_bytes(keys: Metadata, layers: int, hidden: int) -> int:
    """What a recurrent layer keeps per sequence: `n_embd_r` and `n_embd_s`, always as F32."""
    if keys.has("wkv.head_size"):
        shifts = keys.number("token_shift_count", default=2)
        return _F32_BYTES * hidden * (shifts + keys.number("wkv.head_size"))
    if keys.has("shortconv.l_cache"):
        return _F32_BYTES * hidden * (keys.number("shortconv.l_cache", minimum=1) - 1)
    if keys.has("kda.head_dim"):
        return _F32_BYTES * _delta_attention_elements(keys, layers)
    if keys.architecture == "minimax-01":
        key, _ = _head_sizes(keys, layers, hidden)
        return _F32_BYTES * key * key * _heads(keys, layers)[0]
    return _F32_BYTES * _state_space_elements(keys)


def _delta_attention_elements(keys: Metadata, layers: int) -> int:
    size, heads = keys.number("kda.head_dim"), _heads(keys, layers)[0]
    kernel = keys.number("ssm.conv_kernel", default=0) or 4
    return 3 * (kernel - 1) * heads * size + size * size * heads


def _state_space_elements(keys: Metadata) -> int:
    kernel, inner = keys.number("ssm.conv_kernel", minimum=1), keys.number("ssm.inner_size")
    state = keys.number("ssm.state_size")
    groups = 0 if keys.architecture in _WITHOUT_GROUPS else keys.number("ssm.group_count", default=0)
    return (kernel - 1) * (inner + 2 * groups * state) + state * inner
