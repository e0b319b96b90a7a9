"""The arithmetic of memory: exact caches, sane compute, and the largest context that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.defaults import CACHE_TYPES
from mesh_llm.errors import UsageError
from mesh_llm.planning.fit import (
    CacheSettings,
    cache_bytes,
    compute_bytes,
    largest_context,
    layer_cache_bytes,
    memory_need,
    refusal,
)
from mesh_llm.types import Fingerprint, Layer, LayerCache, ModelFacts

ATTENTION = LayerCache(k_width=192, v_width=192)
SLIDING = LayerCache(k_width=192, v_width=192, window=1024)
RECURRENT = LayerCache(state_bytes=5000)


def model(*caches: LayerCache, context_trained: int = 8192, weight_bytes: int = 3_000_000) -> ModelFacts:
    """SmolLM2's measures, with the given layers."""
    return ModelFacts(
        files=(Path("model.gguf"),),
        fingerprint=Fingerprint("f"),
        size_bytes=0,
        name="Small",
        architecture="llama",
        quantisation="Q4_1",
        layers=tuple(Layer(weight_bytes=weight_bytes, cache=cache) for cache in caches),
        embedding_bytes=1_000_000,
        head_bytes=0,
        other_bytes=10,
        hidden=576,
        feed_forward=1536,
        heads=9,
        vocabulary=49152,
        context_trained=context_trained,
        experts=0,
        experts_used=0,
        expert_feed_forward=0,
        query_elements=1152,
        widest=1536,
        causal=True,
        pooled=False,
        chat_template=None,
    )


SMALL = model(*[ATTENTION] * 30)


def layer(cache: LayerCache) -> Layer:
    return Layer(weight_bytes=0, cache=cache)


def test_cache_of_an_attention_layer() -> None:
    settings = CacheSettings(context=2048, slots=2)

    assert layer_cache_bytes(layer(ATTENTION), settings) == 2 * 2048 * (192 + 192) * 2
    assert cache_bytes(SMALL, settings) == 90 << 20


def test_cells_are_rounded_up_to_256_per_slot() -> None:
    one = layer_cache_bytes(layer(ATTENTION), CacheSettings(context=1, slots=1))

    assert one == 256 * 384 * 2
    assert layer_cache_bytes(layer(ATTENTION), CacheSettings(context=256, slots=1)) == one
    assert layer_cache_bytes(layer(ATTENTION), CacheSettings(context=257, slots=3)) == 6 * one


@pytest.mark.parametrize(
    ("context", "cells"),
    [(512, 512), (1024, 1024), (1536, 1536), (2048, 1536), (100_000, 1536)],
)
def test_a_window_bounds_the_cells(context: int, cells: int) -> None:
    settings = CacheSettings(context=context, slots=2)

    assert layer_cache_bytes(layer(SLIDING), settings) == 2 * cells * 384 * 2


def test_a_window_and_its_micro_batch_are_rounded_up_together() -> None:
    narrow = layer(LayerCache(k_width=1, v_width=0, window=100))

    assert layer_cache_bytes(narrow, CacheSettings(context=4096, slots=1)) == 768 * 2
    assert layer_cache_bytes(narrow, CacheSettings(context=4096, slots=1, micro_batch=128)) == 256 * 2


def test_recurrent_layers_do_not_grow_with_the_context() -> None:
    assert layer_cache_bytes(layer(RECURRENT), CacheSettings(context=256, slots=3)) == 15_000
    assert layer_cache_bytes(layer(RECURRENT), CacheSettings(context=65536, slots=3)) == 15_000


@pytest.mark.parametrize(
    ("kind", "bytes_of_192"),
    [
        ("f32", 768),
        ("f16", 384),
        ("bf16", 384),
        ("q8_0", 204),
        ("q5_1", 144),
        ("q5_0", 132),
        ("q4_1", 120),
        ("q4_0", 108),
        ("iq4_nl", 108),
    ],
)
def test_cache_types(kind: str, bytes_of_192: int) -> None:
    settings = CacheSettings(context=256, slots=1, type_k=kind)

    assert layer_cache_bytes(layer(ATTENTION), settings) == 256 * (bytes_of_192 + 384)
    assert kind in CACHE_TYPES


def test_the_size_of_every_cache_type_is_known() -> None:
    for kind in CACHE_TYPES:
        assert layer_cache_bytes(layer(ATTENTION), CacheSettings(context=256, slots=1, type_k=kind))


def test_compressed_layers_have_no_values() -> None:
    compressed = layer(LayerCache(k_width=576))

    assert layer_cache_bytes(compressed, CacheSettings(context=256, slots=1, type_v="f32")) == 256 * 576 * 2


def test_without_flash_attention_values_are_as_wide_as_the_widest() -> None:
    facts = model(ATTENTION, LayerCache(k_width=64, v_width=64), RECURRENT)
    plain = CacheSettings(context=256, slots=1, flash_attention=False)

    assert cache_bytes(facts, plain) == 256 * (192 + 192 + 64 + 192) * 2 + 5000
    assert cache_bytes(facts, replace(plain, flash_attention=True)) == 256 * (384 + 128) * 2 + 5000


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="q9 is not a cache type; choose one of f32, f16, bf16, q8_0"):
        CacheSettings(context=512, slots=1, type_v="q9")
    with pytest.raises(UsageError, match="at least 1"):
        CacheSettings(context=512, slots=0)


def test_compute_terms() -> None:
    """Six hidden states, three feed-forward widths, an F16 mask, and logits for each slot."""
    tokens = 512 + 1

    assert compute_bytes(SMALL, CacheSettings(context=2048, slots=2)) == (
        tokens * 4 * (6 * 576 + 3 * 1536) + tokens * 2048 * 2 + 2 * 49152 * 4
    )


def test_compute_of_a_mixture_takes_the_larger_step() -> None:
    one = CacheSettings(context=512, slots=1)
    mixture = replace(SMALL, experts=8, experts_used=4, expert_feed_forward=1000, feed_forward=0)
    fixed = 512 * 4 * 6 * 576 + 512 * 512 * 2 + 49152 * 4

    assert compute_bytes(mixture, one) == fixed + 512 * 4 * 3 * 4 * 1000
    assert compute_bytes(replace(mixture, expert_feed_forward=10), one) == fixed + 512 * 4 * 2 * 4 * 576


def test_compute_has_a_mask_for_each_kind_of_cache() -> None:
    settings = CacheSettings(context=8192, slots=1)
    difference = compute_bytes(model(ATTENTION, SLIDING), settings) - compute_bytes(
        model(ATTENTION), settings
    )

    assert difference == 512 * 1536 * 2


def test_compute_without_flash_attention_holds_all_scores() -> None:
    settings = CacheSettings(context=8192, slots=1, flash_attention=False)

    assert compute_bytes(SMALL, settings) == (512 * 4 * (6 * 576 + 1152 + 9 * 8192 + 8192) + 49152 * 4)


def test_many_slots_of_a_large_vocabulary() -> None:
    many = CacheSettings(context=512, slots=256)
    tokens = 512 + 255

    assert compute_bytes(SMALL, many) == tokens * 4 * 6 * 576 + tokens * 512 * 2 + 2 * 256 * 49152 * 4


def test_encoders_compute_among_their_tokens() -> None:
    encoder = model(LayerCache())

    assert cache_bytes(encoder, CacheSettings(context=8192, slots=1)) == 0
    assert compute_bytes(encoder, CacheSettings(context=8192, slots=1)) == (
        512 * 4 * (6 * 576 + 3 * 1536) + 512 * 512 * 2 + 49152 * 4
    )


def test_need_is_the_sum() -> None:
    settings = CacheSettings(context=2048, slots=2)
    need = memory_need(SMALL, settings)

    assert need.weight_bytes == 30 * 3_000_000 + 1_000_010
    assert need.total_bytes == need.weight_bytes + (90 << 20) + compute_bytes(SMALL, settings)


@pytest.mark.parametrize(
    "facts", [SMALL, model(ATTENTION, SLIDING, RECURRENT), model(SLIDING), model(RECURRENT)]
)
@pytest.mark.parametrize("flash_attention", [True, False])
def test_more_context_or_slots_never_needs_less(facts: ModelFacts, flash_attention: bool) -> None:
    def need(context: int, slots: int) -> int:
        settings = CacheSettings(context=context, slots=slots, flash_attention=flash_attention)
        return memory_need(facts, settings).total_bytes

    contexts = [need(context, 2) for context in range(64, 8192, 64)]
    slots = [need(1024, count) for count in range(1, 40)]
    assert contexts == sorted(contexts)
    assert slots == sorted(slots)


@pytest.mark.parametrize("spare", [0, 1, 10_000_000, 50_000_000, 123_456_789])
@pytest.mark.parametrize("slots", [1, 3])
def test_largest_context_fits_and_the_next_does_not(spare: int, slots: int) -> None:
    settings = CacheSettings(context=4096, slots=slots)
    available = memory_need(SMALL, replace(settings, context=512)).total_bytes + spare

    found = largest_context(SMALL, settings, available)

    assert found is not None
    assert found % 256 == 0
    assert 512 <= found < 8192
    assert memory_need(SMALL, replace(settings, context=found)).total_bytes <= available
    assert memory_need(SMALL, replace(settings, context=found + 256)).total_bytes > available


def test_largest_context_at_the_bounds() -> None:
    settings = CacheSettings(context=4096, slots=1)
    least = memory_need(SMALL, replace(settings, context=512)).total_bytes

    assert largest_context(SMALL, settings, least) == 512
    assert largest_context(SMALL, settings, least - 1) is None
    assert largest_context(SMALL, settings, 0) is None
    assert largest_context(SMALL, settings, 1 << 50) == 8192
    assert largest_context(replace(SMALL, context_trained=1000), settings, 1 << 50) == 768
    assert largest_context(replace(SMALL, context_trained=300), settings, 1 << 50) == 300
    assert largest_context(replace(SMALL, context_trained=100), settings, 1 << 50) == 100


def test_refusal_says_what_and_how_much() -> None:
    settings = CacheSettings(context=131072, slots=4)
    facts = replace(SMALL, context_trained=131072)
    need = memory_need(facts, settings)

    error = refusal(facts, settings, need, 8_000_000_000)

    assert error.message == (
        "Small needs 12.3 GB (weights 91 MB, cache 12.1 GB, compute 152 MB) "
        "for 4 slots of 131072 tokens; this machine has 8.0 GB free"
    )
    assert error.hint == (
        "--ctx-size 84480 or --parallel 1 would fit, as would a smaller quantisation or more machines"
    )


def test_refusal_offers_one_slot_with_less_context() -> None:
    settings = CacheSettings(context=8192, slots=8)

    error = refusal(SMALL, settings, memory_need(SMALL, settings), 250_000_000)

    assert error.message.endswith("for 8 slots of 8192 tokens; this machine has 250 MB free")
    assert error.hint == (
        "--ctx-size 512 or --parallel 1 --ctx-size 5888 would fit, "
        "as would a smaller quantisation or more machines"
    )


def test_refusal_when_the_weights_alone_are_too_much() -> None:
    facts = model(ATTENTION, weight_bytes=40_000_000_000)
    settings = CacheSettings(context=8192, slots=1)

    error = refusal(facts, settings, memory_need(facts, settings), 8_000_000_000)

    assert error.message == (
        "Small needs 40.0 GB (weights 40.0 GB, cache 6 MB, compute 25 MB) "
        "for 1 slot of 8192 tokens; this machine has 8.0 GB free"
    )
    assert error.hint == (
        "it needs 40.0 GB even with --parallel 1 --ctx-size 512; "
        "choose a smaller quantisation than Q4_1, or join more machines"
    )
