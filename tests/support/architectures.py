"""Every architecture that the engine lists: a line of metadata for a tiny model, or why there is none.

The shapes of tensors come from the engine's own loader (`forked_engine`), so a new architecture is one line
here: what its loader wants beyond `COMMON`, or another value for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAYERS = 6
HIDDEN = 128
HEADS = 2
HEAD = HIDDEN // HEADS
VOCABULARY = 512
CONTEXT = 1024

Metadata = dict[str, Any]

COMMON: Metadata = {
    "vocab_size": VOCABULARY,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "features_length": HIDDEN,
    "block_count": LAYERS,
    "feed_forward_length": 192,
    "use_parallel_residual": False,
    "logit_scale": 1.0,
    "time_mix_extra_dim": 32,
    "time_decay_extra_dim": 32,
    "full_attention_interval": 2,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.max_alibi_bias": 8.0,
    "attention.clamp_kqv": 1.0,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.relative_buckets_count": 8,
    "attention.sliding_window": 128,
    "attention.sliding_window_pattern": 2,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "rope.dimension_sections": [HEAD // 4] * 4,
    "posnet.embedding_length": HIDDEN,
    "posnet.block_count": LAYERS,
    "convnext.embedding_length": HIDDEN,
    "convnext.block_count": LAYERS,
    "ssm.inner_size": 2 * HIDDEN,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 64,
    "ssm.time_step_rank": HEADS,
    "ssm.group_count": 2,
    "kda.head_dim": 64,
    "kda.gate_lower_bound": -5.0,
    "wkv.head_size": 64,
    "shortconv.l_cache": 3,
    "residual_scale": 3.5,
    "attn_res.block_size": 12,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
}
MIXTURE: Metadata = {
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
    "expert_latent_length": 64,
    "interleave_moe_layer_step": 2,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "experts_per_group": 1,
}
LATENT: Metadata = {
    "attention.head_count_kv": 1,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 32,
}
EVERY_SECOND: Metadata = {"attention.head_count_kv": [HEADS if i % 2 else 0 for i in range(LAYERS)]}
LATENT_EVERY_SECOND = LATENT | {"attention.head_count_kv": [i % 2 for i in range(LAYERS)]}
SLIDING: Metadata = {"attention.sliding_window_pattern": [i % 2 == 0 for i in range(LAYERS)]}
LORA: Metadata = {
    f"attention.{name}_lora_rank": 32 for name in ("decay", "iclr", "value_residual_mix", "gate")
}
INDEXER: Metadata = {"attention.indexer.types": [1] * LAYERS}
DELTA: Metadata = {"ssm.inner_size": HIDDEN}
HYPER: Metadata = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 1.0,
}
MODELS: dict[str, Metadata] = {
    "llama": {},
    "llama4": MIXTURE | {"block_count": 8},
    "deci": {},
    "falcon": {},
    "grok": MIXTURE,
    "gpt2": {},
    "gptneox": {},
    "mpt": {},
    "baichuan": {},
    "starcoder": {},
    "refact": {},
    "bloom": {},
    "stablelm": {},
    "qwen": {},
    "qwen2": {},
    "qwen2moe": MIXTURE,
    "qwen2vl": {},
    "qwen3": {},
    "qwen3moe": MIXTURE,
    "qwen3next": MIXTURE | DELTA,
    "qwen3vl": {},
    "qwen3vlmoe": MIXTURE,
    "qwen35": DELTA,
    "qwen35moe": MIXTURE | DELTA,
    "qwen4exp": MIXTURE | HYPER | DELTA | {"attention.compress_ratios": [4] * LAYERS},
    "phi2": {},
    "phi3": {},
    "phimoe": MIXTURE,
    "plamo": {},
    "plamo2": EVERY_SECOND | {"ssm.group_count": 0},
    "plamo3": {},
    "codeshell": {},
    "orion": {},
    "internlm2": {},
    "minicpm": {},
    "minicpm3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3n": {"block_count": 22},
    "gemma4": SLIDING
    | {
        "embedding_length_per_layer_input": 64,
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
        "rope.freq_base_swa": 10000.0,
    },
    "starcoder2": {},
    "mamba": {},
    "mamba2": {},
    "maple": MIXTURE | SLIDING | {"swiglu_clamp_exp": 4.0},
    "jamba": EVERY_SECOND,
    "falcon-h1": {},
    "xverse": {},
    "command-r": {},
    "cohere2": {},
    "cohere2moe": MIXTURE | SLIDING,
    "dbrx": MIXTURE,
    "olmo": {},
    "olmo2": {},
    "olmoe": MIXTURE,
    "muse-glimmer": SLIDING,
    "openelm": {},
    "arctic": MIXTURE,
    "deepseek": MIXTURE,
    "deepseek2": MIXTURE | LATENT,
    "deepseek2-ocr": MIXTURE,
    "deepseek32": MIXTURE | LATENT | INDEXER,
    "deepseek4": MIXTURE
    | HYPER
    | {
        "embedding_length": 512,
        "attention.head_count": 8,
        "expert_gating_func": 4,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": 10.0,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 32,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.compress_ratios": [0, 0, 4, 128, 4, 128],
        "hash_layer_count": 2,
    },
    "chatglm": {},
    "glm4": {},
    "glm4moe": MIXTURE,
    "glm-dsa": MIXTURE | LATENT | INDEXER,
    "bitnet": {},
    "t5": {},
    "jais": {},
    "jais2": {},
    "nemotron": {},
    "nemotron_h": EVERY_SECOND | {"feed_forward_length": [0, 0, 192, 0, 0, 192]},
    "nemotron_h_moe": MIXTURE | EVERY_SECOND | {"feed_forward_length": [0, 0, 192, 0, 0, 192]},
    "exaone": {},
    "exaone4": {},
    "exaone-moe": MIXTURE,
    "rwkv6": {},
    "rwkv6qwen2": {"token_shift_count": 1},
    "rwkv7": LORA,
    "arwkv7": LORA | {"token_shift_count": 1},
    "granite": {},
    "granitemoe": MIXTURE,
    "granitehybrid": EVERY_SECOND,
    "granite_swa": SLIDING,
    "bailingmoe": MIXTURE,
    "bailingmoe2": MIXTURE,
    "bailingmoe3": MIXTURE
    | LATENT_EVERY_SECOND
    | {"kda.safe_gate": True, "rope.dimension_sections": [4, 6, 6, 0]},
    "dots1": MIXTURE,
    "dots3note": MIXTURE
    | LATENT
    | SLIDING
    | {
        "attention.kv_lora_rank_swa": 64,
        "attention.key_length_swa": 96,
        "attention.value_length_swa": 64,
        "attention.key_length_mla_swa": 64,
        "attention.value_length_mla_swa": 64,
        "rope.freq_base_swa": 10000.0,
        "attention.indexer.types": [i % 2 for i in range(LAYERS)],
    },
    "arcee": {},
    "afmoe": MIXTURE,
    "laguna": MIXTURE,
    "ernie4_5": {},
    "ernie4_5-moe": MIXTURE,
    "hunyuan-moe": MIXTURE,
    "hunyuan-dense": {},
    "hunyuan_vl": {},
    "hy_v3": MIXTURE,
    "hy_v4": MIXTURE | LATENT | HYPER | INDEXER,
    "smollm3": {},
    "gpt-oss": MIXTURE,
    "lfm2": EVERY_SECOND,
    "lfm2moe": MIXTURE | EVERY_SECOND,
    "smallthinker": MIXTURE,
    "seed_oss": {},
    "grovemoe": MIXTURE,
    "apertus": {"xielu.alpha_n": 1.0, "xielu.alpha_p": 1.0, "xielu.beta": 1.0, "xielu.eps": 1e-7},
    "minimax-01": MIXTURE,
    "hrm_text": {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    "minimax-m2": MIXTURE,
    "minimax-m3": MIXTURE | {"rope.dimension_count": 32},
    "cogvlm": {},
    "pangu-embedded": {},
    "mistral3": {},
    "mistral4": MIXTURE | LATENT,
    "paddleocr": {},
    "mimo2": MIXTURE | SLIDING,
    "step35": MIXTURE | SLIDING,
    "spark2_5": SLIDING,
    "maincoder": {},
    "kimi-linear": MIXTURE | LATENT_EVERY_SECOND,
    "kimi-k3": MIXTURE | LATENT_EVERY_SECOND,
    "glm5-next": MIXTURE
    | LATENT_EVERY_SECOND
    | HYPER
    | INDEXER
    | {"attention.key_length": 64, "rope.dimension_count": 0, "attention.indexer.kpool": 4},
    "talkie": {},
    "mellum": MIXTURE,
    "nanbeige": {},
    "pockettts": {},
    "k2-horizon": {"rope.scaling.yarn_beta_fast": 128.0, "rope.scaling.yarn_beta_slow": 4.0},
}
TYPES: Metadata = {"tokenizer.ggml.token_type_count": 2}

ENCODERS: dict[str, Metadata] = {
    "bert": TYPES,
    "modern-bert": {},
    "nomic-bert": TYPES,
    "nomic-bert-moe": MIXTURE | TYPES | {"moe_every_n_layers": 2},
    "neo-bert": {},
    "jina-bert-v2": TYPES,
    "jina-bert-v3": TYPES,
    "eurobert": {},
    "gemma-embedding": {},
    "gemma-embedding2": {"embedding_length_per_layer_input": 64},
    "llama-embed": {},
    "t5encoder": {},
    "dream": {},
    "llada": {},
    "llada-moe": MIXTURE,
    "rnd1": MIXTURE,
}
"""Read a text at once and write none: tried with embeddings."""

OMITTED: dict[str, tuple[str, ...]] = {"rwkv6qwen2": ("time_mix_first",)}
"""Tensors that the engine's loader takes, and its graph does not, in the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """From one hop for each worker and one back, and one run for each worker and token."""

    hops: int
    runs: int
    cause: str


_READ_TWICE = Exemption(
    hops=5, runs=1, cause="the engine reads the last layer's result for its head, and again as an embedding"
)
EXCEPTIONS: dict[str, Exemption] = {
    "dream": _READ_TWICE,
    "llada": _READ_TWICE,
    "llada-moe": _READ_TWICE,
    "rnd1": _READ_TWICE,
    "hrm_text": Exemption(
        hops=48, runs=15, cause="each token goes through the layers several times, and so through all stages"
    ),
}

HOPS_OF_TWO: dict[str, int] = {"hy_v4": 18}
"""With two answers at once, over two workers: eight tensors between them go through the host one by one."""
ONE_AT_ONCE = {"t5"}
"""The engine ends itself over two answers at once, alone, too."""

_DRAFTS = "drafts for another model and is never split: drafts stay on the host"
_SOUND = "makes sound, which llama-server does not serve"
SHARED: dict[str, Metadata] = {
    "gemma3n": MODELS["gemma3n"],
    "gemma4": MODELS["gemma4"] | {"attention.shared_kv_layers": 2},
}
"""Share caches between their last layers, as the E models of Gemma do: no cut may lie there."""
CUTS: dict[str, tuple[int, ...]] = {"gemma3n": (1, 4)}
"""Where the last four layers stay together; all others are cut anywhere."""

REASONS: dict[str, str] = {
    "clip": "a projector for images, which runs on the host",
    "gptj": "listed by the engine, which cannot load it",
    "plm": "the engine ends itself over its graph, alone, too",
    "chameleon": "half done in the engine, which ends itself over a vocabulary without images",
    "clef": "decides between options, with heads of its own that llama-server has no request for",
    "eagle3": _DRAFTS,
    "dflash": _DRAFTS,
    "gemma4-assistant": _DRAFTS,
    "graniteswitch": "never split: it chooses adapters for all layers by a cache behind the last one",
    "wavtokenizer-dec": _SOUND,
    "qwen3tts": _SOUND,
}
"""Architectures that no tiny model is made of, and why."""
