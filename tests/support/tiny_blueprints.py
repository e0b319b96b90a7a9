"""What a tiny model of each architecture consists of: metadata and tensor shapes.

Shapes are in numpy's order (rows first), which is the reverse of GGUF's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

Value = int | float | bool | str | list[int] | list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model; the defaults give some 0.3 MB of weights and rows of whole 32-blocks."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    feed_forward: int = 128
    vocabulary: int = 512
    context: int = 8192
    experts: int = 4
    experts_used: int = 2
    expert_feed_forward: int = 64
    window: int = 64
    kv_rank: int = 32
    """MLA: width of the compressed cache, without the rotated part."""
    query_rank: int = 32
    rotated: int = 16
    nope: int = 32
    """MLA: width of the part of each key that is not rotated."""
    state: int = 16
    """State-space layers: elements per channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    architecture: str
    dimensions: Dimensions
    metadata: dict[str, Value] = field(default_factory=dict)
    """Keys without the architecture in front, but for the tokenizer's."""
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)


def blueprint(architecture: str, dimensions: Dimensions) -> Blueprint:
    return (_ARCHITECTURES | _ENCODERS)[architecture](dimensions)


def architectures() -> tuple[str, ...]:
    """Those that write text."""
    return tuple(_ARCHITECTURES)


def _common(d: Dimensions) -> dict[str, Value]:
    return {
        "block_count": d.layers,
        "context_length": d.context,
        "embedding_length": d.hidden,
        "feed_forward_length": d.feed_forward,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": d.vocabulary,
    }


def _heads(size: int) -> dict[str, Value]:
    return {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}


def _ends(d: Dimensions, *, tied: bool = False, norm: str = "output_norm") -> dict[str, tuple[int, ...]]:
    head = {} if tied else {"output.weight": (d.vocabulary, d.hidden)}
    return {"token_embd.weight": (d.vocabulary, d.hidden), f"{norm}.weight": (d.hidden,), **head}


def _attention(
    d: Dimensions, *, head_size: int, bias: bool = False, norms: bool = False
) -> dict[str, tuple[int, ...]]:
    widths = {"q": d.heads * head_size, "k": d.kv_heads * head_size, "v": d.kv_heads * head_size}
    tensors: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d.hidden,)}
    for name, width in widths.items():
        tensors[f"attn_{name}.weight"] = (width, d.hidden)
        if bias:
            tensors[f"attn_{name}.bias"] = (width,)
    tensors["attn_output.weight"] = (d.hidden, widths["q"])
    if norms:
        tensors |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
    return tensors


def _dense(d: Dimensions, *, suffix: str = "", width: int | None = None) -> dict[str, tuple[int, ...]]:
    width = d.feed_forward if width is None else width
    return {
        f"ffn_gate{suffix}.weight": (width, d.hidden),
        f"ffn_up{suffix}.weight": (width, d.hidden),
        f"ffn_down{suffix}.weight": (d.hidden, width),
    }


def _mixture(d: Dimensions) -> dict[str, tuple[int, ...]]:
    inner, count = d.expert_feed_forward, d.experts
    return {
        "ffn_gate_inp.weight": (count, d.hidden),
        "ffn_gate_exps.weight": (count, inner, d.hidden),
        "ffn_up_exps.weight": (count, inner, d.hidden),
        "ffn_down_exps.weight": (count, d.hidden, inner),
    }


def _expert_keys(d: Dimensions) -> dict[str, Value]:
    return {
        "expert_count": d.experts,
        "expert_used_count": d.experts_used,
        "expert_feed_forward_length": d.expert_feed_forward,
    }


def _build(
    architecture: str,
    d: Dimensions,
    metadata: dict[str, Value],
    layer: Callable[[int], dict[str, tuple[int, ...]]],
    ends: dict[str, tuple[int, ...]],
) -> Blueprint:
    tensors = dict(ends)
    for index in range(d.layers):
        tensors |= {f"blk.{index}.{name}": shape for name, shape in layer(index).items()}
    return Blueprint(architecture=architecture, dimensions=d, metadata=_common(d) | metadata, tensors=tensors)


def _llama(d: Dimensions) -> Blueprint:
    block = _attention(d, head_size=d.head_size) | {"ffn_norm.weight": (d.hidden,)} | _dense(d)
    return _build("llama", d, _heads(d.head_size), lambda _: block, _ends(d))


def _qwen2(d: Dimensions) -> Blueprint:
    # The query is as wide as the hidden state here; the engine accepts nothing else.
    d = replace(d, head_size=d.hidden // d.heads)
    block = _attention(d, head_size=d.head_size, bias=True) | {"ffn_norm.weight": (d.hidden,)} | _dense(d)
    return _build("qwen2", d, {}, lambda _: block, _ends(d, tied=True))


def _qwen3(d: Dimensions) -> Blueprint:
    block = _attention(d, head_size=d.head_size, norms=True) | {"ffn_norm.weight": (d.hidden,)} | _dense(d)
    return _build("qwen3", d, _heads(d.head_size), lambda _: block, _ends(d))


def _qwen3moe(d: Dimensions) -> Blueprint:
    block = _attention(d, head_size=d.head_size, norms=True) | {"ffn_norm.weight": (d.hidden,)} | _mixture(d)
    return _build("qwen3moe", d, _heads(d.head_size) | _expert_keys(d), lambda _: block, _ends(d))


def _gemma3(d: Dimensions) -> Blueprint:
    block = _attention(d, head_size=d.head_size, norms=True) | _dense(d)
    for name in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
        block[f"{name}.weight"] = (d.hidden,)
    keys = _heads(d.head_size) | {"attention.sliding_window": d.window}
    # Every second layer is global, where a real one has every sixth: four layers have to show both kinds.
    pattern = [index % 2 == 0 for index in range(d.layers)]
    keys["attention.sliding_window_pattern"] = pattern
    return _build("gemma3", d, keys, lambda _: block, _ends(d, tied=True))


def _deepseek2(d: Dimensions) -> Blueprint:
    key = d.nope + d.rotated
    attention = {
        "attn_norm.weight": (d.hidden,),
        "attn_q_a.weight": (d.query_rank, d.hidden),
        "attn_q_a_norm.weight": (d.query_rank,),
        "attn_q_b.weight": (d.heads * key, d.query_rank),
        "attn_kv_a_mqa.weight": (d.kv_rank + d.rotated, d.hidden),
        "attn_kv_a_norm.weight": (d.kv_rank,),
        "attn_k_b.weight": (d.heads, d.kv_rank, d.nope),
        "attn_v_b.weight": (d.heads, d.head_size, d.kv_rank),
        "attn_output.weight": (d.hidden, d.heads * d.head_size),
        "ffn_norm.weight": (d.hidden,),
    }
    mixture = _mixture(d) | _dense(d, suffix="_shexp", width=d.expert_feed_forward)
    mixture["exp_probs_b.bias"] = (d.experts,)
    keys: dict[str, Value] = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": d.query_rank,
        "attention.kv_lora_rank": d.kv_rank,
        "attention.key_length": d.kv_rank + d.rotated,
        "attention.value_length": d.kv_rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": d.head_size,
        "rope.dimension_count": d.rotated,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    return _build(
        "deepseek2",
        d,
        keys | _expert_keys(d),
        lambda index: attention | (_dense(d) if index == 0 else mixture),
        _ends(d),
    )


def _gpt_oss(d: Dimensions) -> Blueprint:
    block = _attention(d, head_size=d.head_size, bias=True) | _mixture(d)
    block |= {
        "post_attention_norm.weight": (d.hidden,),
        "attn_output.bias": (d.hidden,),
        "attn_sinks.weight": (d.heads,),
        "ffn_gate_inp.bias": (d.experts,),
        "ffn_gate_exps.bias": (d.experts, d.expert_feed_forward),
        "ffn_up_exps.bias": (d.experts, d.expert_feed_forward),
        "ffn_down_exps.bias": (d.experts, d.hidden),
    }
    keys = _heads(d.head_size) | _expert_keys(d) | {"attention.sliding_window": d.window}
    return _build("gpt-oss", d, keys, lambda _: block, _ends(d))


def _lfm2(d: Dimensions) -> Blueprint:
    d = replace(d, head_size=d.hidden // d.heads)
    attention = _attention(d, head_size=d.head_size, norms=True)
    convolution = {
        "attn_norm.weight": (d.hidden,),
        "shortconv.conv.weight": (d.hidden, 3),
        "shortconv.in_proj.weight": (3 * d.hidden, d.hidden),
        "shortconv.out_proj.weight": (d.hidden, d.hidden),
    }
    rest = {"ffn_norm.weight": (d.hidden,)} | _dense(d)
    # Convolutions first: the engine sees an attention layer by its key-value heads.
    kv_heads = [d.kv_heads if index % 2 else 0 for index in range(d.layers)]
    keys: dict[str, Value] = {"attention.head_count_kv": kv_heads, "shortconv.l_cache": 3}
    return _build(
        "lfm2",
        d,
        keys,
        lambda index: (attention if kv_heads[index] else convolution) | rest,
        _ends(d, tied=True, norm="token_embd_norm"),
    )


def _granite_hybrid(d: Dimensions) -> Blueprint:
    inner, groups, ssm_heads = 2 * d.hidden, 1, 4
    channels = inner + 2 * groups * d.state
    state_space = {
        "attn_norm.weight": (d.hidden,),
        "ssm_in.weight": (inner + channels + ssm_heads, d.hidden),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (ssm_heads,),
        "ssm_a": (ssm_heads, 1),
        "ssm_d": (ssm_heads, 1),
        "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (d.hidden, inner),
    }
    attention = _attention(d, head_size=d.head_size)
    rest = {"ffn_norm.weight": (d.hidden,)} | _dense(d)
    kv_heads = [d.kv_heads if index % 2 else 0 for index in range(d.layers)]
    keys: dict[str, Value] = {
        "attention.head_count_kv": kv_heads,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": d.state,
        "ssm.time_step_rank": ssm_heads,
        "ssm.group_count": groups,
    }
    return _build(
        "granitehybrid",
        d,
        _heads(d.head_size) | keys,
        lambda index: (attention if kv_heads[index] else state_space) | rest,
        _ends(d, tied=True),
    )


def _bert(d: Dimensions) -> Blueprint:
    """Makes embeddings: the mean of all tokens, which see each other in both directions."""
    d = replace(d, head_size=d.hidden // d.heads, kv_heads=d.heads)
    block = _attention(d, head_size=d.head_size, bias=True)
    del block["attn_norm.weight"]
    block |= {f"ffn_up.{part}": shape for part, shape in _affine(d.feed_forward, d.hidden).items()}
    block |= {f"ffn_down.{part}": shape for part, shape in _affine(d.hidden, d.feed_forward).items()}
    block["attn_output.bias"] = (d.hidden,)
    for name in ("attn_output_norm", "layer_output_norm"):
        block |= {f"{name}.weight": (d.hidden,), f"{name}.bias": (d.hidden,)}
    ends = {
        "token_embd.weight": (d.vocabulary, d.hidden),
        "token_types.weight": (2, d.hidden),
        "position_embd.weight": (d.context, d.hidden),
        "token_embd_norm.weight": (d.hidden,),
        "token_embd_norm.bias": (d.hidden,),
    }
    keys: dict[str, Value] = {
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 1,
        "tokenizer.ggml.token_type_count": 2,
    }
    return _build("bert", d, keys, lambda _: block, ends)


def _affine(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (rows, columns), "bias": (rows,)}


_ENCODERS: dict[str, Callable[[Dimensions], Blueprint]] = {"bert": _bert}
_ARCHITECTURES: dict[str, Callable[[Dimensions], Blueprint]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "granitehybrid": _granite_hybrid,
}
