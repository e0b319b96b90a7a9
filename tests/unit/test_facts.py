"""What a document about a GGUF turns into: names, sizes, and the cache of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.errors import ModelError
from mesh_llm.models.facts import model_facts
from mesh_llm.types import LayerCache


def document(architecture: str = "llama", *, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """A sound document; `changes` are keys of the architecture with `__` for a dot, None to leave out."""
    keys: dict[str, Any] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors: list[list[Any]] = [
        ["token_embd.weight", "q8_0", [64, 100, 1, 1], 6800, 0],
        ["output.weight", "q6_K", [64, 100, 1, 1], 5250, 0],
        ["output_norm.weight", "f32", [64, 1, 1, 1], 256, 0],
    ]
    for index in range(min(layers, 8)):
        tensors.append([f"blk.{index}.ffn_up.weight", "q4_K", [64, 128, 1, 1], 4608, 0])
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "A Model",
        "general.file_type": 15,
        "tokenizer.ggml.tokens": {"length": 100},
        "tokenizer.chat_template": "{{ messages }}",
    }
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {
        "metadata": metadata,
        "tensors": tensors,
        "files": [{"path": "/models/a-model.gguf", "bytes": 30_000}],
        "fingerprint": "00112233445566778899aabbccddeeff",
    }


def caches(architecture: str, **changes: Any) -> list[LayerCache]:
    return [layer.cache for layer in model_facts(document(architecture, **changes)).layers]


def attention(k: int, v: int, window: int = 0) -> LayerCache:
    return LayerCache(k_width=k, v_width=v, window=window)


def test_facts_of_a_plain_model() -> None:
    facts = model_facts(document())

    assert facts.files == (Path("/models/a-model.gguf"),)
    assert facts.fingerprint == "00112233445566778899aabbccddeeff"
    assert (facts.name, facts.architecture, facts.quantisation) == ("A Model", "llama", "Q4_K_M")
    assert [layer.weight_bytes for layer in facts.layers] == [4608, 4608]
    assert (facts.embedding_bytes, facts.head_bytes, facts.other_bytes) == (6800, 5250, 256)
    assert facts.weight_bytes == 6800 + 5250 + 256 + 2 * 4608
    assert facts.size_bytes == 30_000
    assert (facts.hidden, facts.feed_forward, facts.heads, facts.vocabulary) == (64, 128, 4, 100)
    assert (facts.context_trained, facts.experts, facts.experts_used) == (4096, 0, 0)
    assert (facts.expert_feed_forward, facts.query_elements, facts.widest) == (0, 128, 128)
    assert (facts.causal, facts.pooled, facts.chat_template) == (True, False, "{{ messages }}")


def test_name_falls_back_to_the_file_without_its_shard_number() -> None:
    described = document()
    del described["metadata"]["general.name"]
    described["files"] = [{"path": f"/m/Big-0000{i}-of-00002.gguf", "bytes": 5} for i in (1, 2)]

    facts = model_facts(described)

    assert (facts.name, facts.size_bytes, len(facts.files)) == ("Big", 10, 2)


@pytest.mark.parametrize("told", [None, 4, 9999, "x", True])
def test_quantisation_falls_back_to_the_commonest_type(told: object) -> None:
    described = document(layers=4)
    described["metadata"]["general.file_type"] = told

    assert model_facts(described).quantisation == "Q4_K"


def test_tied_head_counts_nothing() -> None:
    described = document()
    described["tensors"] = [row for row in described["tensors"] if row[0] != "output.weight"]

    assert model_facts(described).head_bytes == 0


def test_experts() -> None:
    described = document(
        "qwen3moe", expert_count=8, expert_used_count=2, expert_feed_forward_length=48, layers=1
    )
    described["tensors"].append(["blk.0.ffn_up_exps.weight", "f16", [64, 96, 8, 1], 98304, 0])

    facts = model_facts(described)

    assert (facts.experts, facts.experts_used, facts.expert_feed_forward) == (8, 2, 48)
    assert facts.widest == 2 * 96


def test_encoders_keep_nothing_and_pool() -> None:
    facts = model_facts(document("bert", pooling_type=1, attention__causal=False))

    assert [layer.cache for layer in facts.layers] == [LayerCache(), LayerCache()]
    assert (facts.causal, facts.pooled) == (False, True)


@pytest.mark.parametrize(
    ("architecture", "pooling", "encodes", "ranks"),
    [
        ("llama", None, False, False),
        ("llama", 0, False, False),
        ("qwen3", 3, True, False),
        ("qwen3", 4, True, True),
        ("nomic-bert", None, True, False),
        ("bert", 4, True, True),
        ("llada", None, False, False),
    ],
)
def test_what_it_is_for(architecture: str, pooling: int | None, encodes: bool, ranks: bool) -> None:
    facts = model_facts(document(architecture, **({} if pooling is None else {"pooling_type": pooling})))

    assert (facts.encodes, facts.ranks) == (encodes, ranks)


def test_grouped_queries() -> None:
    assert caches("llama") == [attention(32, 32)] * 2
    assert caches("llama", attention__head_count_kv=None) == [attention(64, 64)] * 2
    assert caches("llama", attention__head_count_kv=[1, 4]) == [attention(16, 16), attention(64, 64)]
    assert caches("llama", attention__key_length=40, attention__value_length=24) == [attention(80, 48)] * 2


def test_an_unknown_architecture_counts_as_plain_attention() -> None:
    assert caches("tomorrow", attention__sliding_window=16) == [attention(32, 32)] * 2


def test_a_window_that_the_engine_ignores() -> None:
    assert caches("phi3", attention__sliding_window=512) == [attention(32, 32)] * 2
    assert caches("llama", attention__sliding_window=512) == [attention(32, 32)] * 2


def test_compressed_attention_keeps_keys_only() -> None:
    keys: dict[str, Any] = {
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
    }
    facts = model_facts(document("deepseek2", **keys))

    assert [layer.cache for layer in facts.layers] == [attention(576, 0)] * 2
    assert facts.query_elements == 4 * (192 + 2 * 576)
    # Files from before the split of kv_b lack the two keys, and run as plain attention.
    keys |= {"attention__key_length_mla": None, "attention__value_length_mla": None}
    assert caches("deepseek2", **keys) == [attention(576, 512)] * 2


def test_sparse_attention_keeps_an_index_key() -> None:
    keys = {
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
        "attention__indexer__key_length": 128,
        "nextn_predict_layers": 1,
    }
    assert caches("deepseek32", layers=3, **keys) == [attention(704, 0)] * 2 + [LayerCache()]


@pytest.mark.parametrize(
    ("architecture", "layers", "keys", "windows"),
    [
        ("gemma3", 7, {"attention__sliding_window": 512}, [512] * 5 + [0, 512]),
        ("gemma3", 3, {"attention__sliding_window": 0}, [0, 0, 0]),
        ("gemma3", 3, {}, [0, 0, 0]),
        ("gemma2", 3, {}, [4096, 0, 4096]),
        ("gpt-oss", 3, {"attention__sliding_window": 128}, [128, 0, 128]),
        ("cohere2", 5, {"attention__sliding_window": 64}, [64, 64, 64, 0, 64]),
        ("cohere2moe", 5, {"attention__sliding_window": 64}, [0, 64, 64, 64, 0]),
        ("llama4", 4, {}, [8192, 8192, 8192, 0]),
        ("llama4", 4, {"attention__sliding_window": 0}, [0, 0, 0, 0]),
        ("smallthinker", 2, {"attention__sliding_window": 7}, [0, 4096]),
        ("exaone4", 30, {"attention__sliding_window": 4096}, [0] * 30),
        ("exaone4", 64, {}, ([4096] * 3 + [0]) * 16),
        (
            "gemma3",
            4,
            {"attention__sliding_window": 9, "attention__sliding_window_pattern": 2},
            [9, 0, 9, 0],
        ),
        (
            "mimo2",
            3,
            {"attention__sliding_window": 9, "attention__sliding_window_pattern": [True, False, 1]},
            [9, 0, 9],
        ),
    ],
)
def test_sliding_windows(architecture: str, layers: int, keys: dict[str, Any], windows: list[int]) -> None:
    assert [cache.window for cache in caches(architecture, layers=layers, **keys)] == windows


def test_sliding_layers_may_have_heads_of_their_own_size() -> None:
    keys = {
        "attention__sliding_window": 32,
        "attention__sliding_window_pattern": [True, False],
        "attention__key_length": 64,
        "attention__value_length": 64,
        "attention__key_length_swa": 16,
        "attention__value_length_swa": 8,
    }
    assert caches("gemma4", **keys) == [attention(32, 16, 32), attention(128, 128)]


def test_layers_that_share_the_cache_of_others() -> None:
    shared = caches(
        "gemma4",
        layers=3,
        attention__shared_kv_layers=2,
        attention__sliding_window=8,
        attention__sliding_window_pattern=[False, False, False],
    )
    assert [cache.k_width for cache in shared] == [32, 0, 0]
    widths = [cache.k_width for cache in caches("gemma3n", layers=24, attention__sliding_window=8)]
    assert widths == [32] * 20 + [0] * 4


@pytest.mark.parametrize(
    ("architecture", "layers", "shared", "expected"),
    [
        *[("gemma4", 42, 18, 20), ("gemma4", 6, 1, 3), ("gemma4", 6, 0, 0), ("gemma4", 6, None, 0)],
        *[("gemma4", 3, 2, 3), ("gemma4", 3, 3, 3)],
        *[("gemma3n", 30, None, 12), ("gemma3n", 21, None, 3), ("gemma3n", 20, None, 0)],
        *[("graniteswitch", 7, None, 7), ("llama", 7, 4, 0)],
    ],
)
def test_layers_that_stay_together(architecture: str, layers: int, shared: int | None, expected: int) -> None:
    """Those that share caches, and the two before them that have these caches."""
    facts = model_facts(document(architecture, layers=layers, attention__shared_kv_layers=shared))
    assert facts.joined_layers == expected


def test_short_convolutions_between_attention() -> None:
    state = LayerCache(state_bytes=64 * 2 * 4)
    assert caches("lfm2", attention__head_count_kv=[0, 2], shortconv__l_cache=3) == [state, attention(32, 32)]


def test_state_spaces_between_attention() -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}
    state = LayerCache(state_bytes=4 * (3 * (128 + 32) + 16 * 128))
    assert caches("granitehybrid", attention__head_count_kv=[0, 2], **ssm) == [state, attention(32, 32)]
    # The older kind has no groups in its convolution, whatever the file says.
    older = LayerCache(state_bytes=4 * (3 * 128 + 16 * 128))
    assert caches("jamba", attention__head_count_kv=[0, 2], **ssm) == [older, attention(32, 32)]
    assert caches("qwen3next", layers=4, **ssm) == [state] * 3 + [attention(32, 32)]
    both = LayerCache(k_width=32, v_width=32, state_bytes=state.state_bytes)
    assert caches("falcon-h1", **ssm) == [both] * 2


def test_feed_forward_layers_keep_nothing() -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}
    kinds = caches(
        "nemotron_h",
        layers=3,
        attention__head_count_kv=[0, 2, 0],
        feed_forward_length=[0, 0, 256],
        **ssm,
    )
    assert kinds == [LayerCache(state_bytes=4 * (3 * 160 + 2048)), attention(32, 32), LayerCache()]


def test_recurrent_models_need_no_heads() -> None:
    without_heads = {"attention__head_count": None, "attention__head_count_kv": None}
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16}
    assert caches("mamba", **without_heads, **ssm) == [LayerCache(state_bytes=4 * (384 + 2048))] * 2
    rwkv = LayerCache(state_bytes=4 * 64 * (2 + 32))
    assert caches("rwkv7", **without_heads, wkv__head_size=32) == [rwkv] * 2


def test_layers_that_predict_ahead_weigh_but_keep_nothing() -> None:
    facts = model_facts(document("glm4moe", layers=3, nextn_predict_layers=1))

    assert [layer.weight_bytes for layer in facts.layers] == [4608] * 3
    assert [layer.cache for layer in facts.layers] == [attention(32, 32)] * 2 + [LayerCache()]


def test_a_layer_that_guesses_further_tokens_can_draft() -> None:
    def guessing(architecture: str, *, layer: int = 2, **changes: Any) -> LayerCache | None:
        told = document(architecture, layers=3, **({"nextn_predict_layers": 1} | changes))
        told["tensors"].append([f"blk.{layer}.nextn.eh_proj.weight", "q4_K", [128, 64, 1, 1], 4608, 0])
        return model_facts(told).mtp_cache

    assert guessing("glm4moe") == attention(32, 32)
    assert guessing("glm4moe", layer=1) is None  # left out of the file
    assert guessing("glm4moe", rope__dimension_sections=[8, 8, 8, 0]) is None
    assert guessing("glm4moe", nextn_predict_layers=2) is None
    assert guessing("step35", attention__sliding_window=64) is None
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16}
    assert guessing("qwen35", **ssm) == attention(32, 32)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"block_count": None}, "it does not say its llama.block_count"),
        ({"embedding_length": None}, "it does not say its llama.embedding_length"),
        ({"context_length": None}, "it does not say its llama.context_length"),
        ({"attention__head_count": None}, "it does not say its llama.attention.head_count"),
        ({"attention__head_count": 0}, "its llama.attention.head_count is 0"),
        ({"attention__head_count": [0, 0]}, "its llama.attention.head_count is 0"),
        (
            {"block_count": 0},
            "its llama.block_count is 0, but should be a whole number from 1 to 512",
        ),
        (
            {"block_count": 1 << 31},
            "its llama.block_count is 2147483648, but should be a whole number from 1 to 512",
        ),
        (
            {"block_count": "many"},
            "its llama.block_count is 'many', but should be a whole number from 1 to 512",
        ),
        ({"block_count": 1}, "it claims 1 layers and has blk.1.ffn_up.weight"),
        (
            {"embedding_length": -64},
            "its llama.embedding_length is -64, but should be a whole number from 1 to 1048576",
        ),
        (
            {"embedding_length": 64.0},
            "its llama.embedding_length is 64.0, but should be a whole number from 1 to 1048576",
        ),
        (
            {"attention__key_length": 1 << 40},
            "its llama.attention.key_length is 1099511627776, "
            "but should be a whole number from 0 to 16777216",
        ),
        (
            {"attention__head_count_kv": [2]},
            "its llama.attention.head_count_kv has 1 entries for 2 layers",
        ),
        (
            {"attention__head_count_kv": {"length": 4000}},
            "its llama.attention.head_count_kv is {'length': 4000}, "
            "but should be a whole number from 0 to 16777216",
        ),
        ({"expert_count": 2, "expert_used_count": 3}, "it uses 3 experts of 2"),
        ({"attention__causal": "no"}, "its llama.attention.causal is 'no', but should be true or false"),
    ],
)
def test_damaged_metadata_is_one_sentence(keys: dict[str, Any], what: str) -> None:
    described = document()
    for key, value in keys.items():
        described["metadata"][f"llama.{key.replace('__', '.')}"] = value
        if value is None:
            del described["metadata"][f"llama.{key.replace('__', '.')}"]

    with pytest.raises(ModelError) as caught:
        model_facts(described)

    assert caught.value.message == f"a-model.gguf is damaged or not a language model: {what}"


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("metadata", None, "it has no metadata"),
        ("metadata", {}, "it does not say its general.architecture"),
        ("metadata", {"general.architecture": 7}, "it does not say its general.architecture"),
        ("tensors", [], "it has no tensors"),
        ("tensors", [["x", "f32", [1], -1, 0]], "its tensor table cannot be read"),
        ("tensors", [["x", "f32", "shape", 4, 0]], "its tensor table cannot be read"),
        ("tensors", [7], "its tensor table cannot be read"),
        ("fingerprint", None, "its fingerprint is missing"),
    ],
)
def test_damaged_documents(part: str, value: Any, what: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_facts(document() | {part: value})

    assert caught.value.message == f"a-model.gguf is damaged or not a language model: {what}"


HOSTILE = [None, -1, 0, 1.5, "x", True, [], [1], [None, None], ["a", "b"], [-1, 2], {"length": 3}, 1 << 62]


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", "deepseek2", "granitehybrid", "qwen3next", "rwkv7"]
)
def test_no_value_of_any_key_gets_past_as_another_error(architecture: str) -> None:
    """Whatever a key holds, the answer is facts or a ModelError."""
    sound: dict[str, Any] = {
        "attention__sliding_window": 8,
        "attention__sliding_window_pattern": 2,
        "attention__key_length": 16,
        "attention__value_length": 16,
        "attention__key_length_mla": 16,
        "attention__value_length_mla": 16,
        "attention__key_length_swa": 16,
        "attention__recurrent_layers": [1, 0],
        "full_attention_interval": 2,
        "ssm__conv_kernel": 4,
        "ssm__inner_size": 8,
        "ssm__state_size": 8,
        "ssm__group_count": 1,
        "wkv__head_size": 8,
        "nextn_predict_layers": 0,
        "expert_count": 2,
        "expert_used_count": 1,
        "pooling_type": 0,
    }
    described = document(architecture, **sound)
    model_facts(described)
    for key in list(described["metadata"]):
        for value in HOSTILE:
            changed = described | {"metadata": described["metadata"] | {key: value}}
            try:
                model_facts(changed)
            except ModelError as error:
                assert error.message.startswith("a-model.gguf is damaged")  # noqa: PT017
