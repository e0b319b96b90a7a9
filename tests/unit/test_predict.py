"""How fast a plan will be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_llm.defaults import SPILL_BYTES_PER_S
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.layer_costs import active_bytes
from mesh_llm.planning.plan_inputs import HOP_QUIC_S, QUIC_BYTES_PER_S, RELAY_BYTES_PER_S
from mesh_llm.planning.predict import LONG_PROMPT_TOKENS, predict
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import LayerCache, LinkKind, ModelFacts, NodeId, Prediction, Speed, Stage
from tests.support.planning import GB, gpu, mesh, model, node

CACHE = CacheSettings(context=4096, slots=1)
WIDE = model()
HEAD_S = 0.4 / 40
"""Of the wide model, at the speed that nodes of tests have."""


def stages(*counts: tuple[str, int]) -> list[Stage]:
    found, first = [], 0
    for name, count in counts:
        found.append(
            Stage(node=NodeId(name), first=first, last=first + count, weight_bytes=0, need_bytes=0, share=0.0)
        )
        first += count
    return found


def predicted(
    facts: ModelFacts, nodes: list[Candidate], *counts: tuple[str, int], head: bool = False
) -> Prediction | None:
    return predict(
        facts, stages(*counts), mesh(*nodes), host=NodeId("a"), settings=CACHE, head_on_worker=head
    )


def test_alone_it_is_bytes_over_bandwidth() -> None:
    found = predicted(WIDE, [node("a", 64, gb_s=51)], ("a", 40))

    assert found
    assert found.tok_s == pytest.approx(51 / 20.4)


def test_a_split_adds_its_hops() -> None:
    hop = 0.010 + HOP_QUIC_S + 4 * 5120 / QUIC_BYTES_PER_S
    nodes = [
        node("a", 64, gb_s=100, links={"b": 20, "c": 20}),
        node("b", 64, gb_s=50, links={"c": 20}),
        node("c", 64, gb_s=200),
    ]

    found = predicted(WIDE, nodes, ("a", 20), ("b", 10), ("c", 10))

    assert found
    assert 1 / found.tok_s == pytest.approx(10.4 / 100 + 5 / 50 + 5 / 200 + 3 * hop)


def test_workers_that_know_no_way_go_over_the_host() -> None:
    nodes = [node("a", 64, links={"b": 20, "c": 20}), node("b", 64), node("c", 64)]
    plain = predict(
        WIDE,
        stages(("a", 20), ("b", 10), ("c", 10)),
        mesh(*nodes, rtt_ms=None),
        host=NodeId("a"),
        settings=CACHE,
    )
    linked = predicted(
        WIDE, [nodes[0], node("b", 64, links={"c": 20}), nodes[2]], ("a", 20), ("b", 10), ("c", 10)
    )

    assert plain
    assert linked
    assert 1 / plain.tok_s - 1 / linked.tok_s == pytest.approx(0.010 + HOP_QUIC_S, rel=1e-6)


def test_a_head_on_a_worker_is_read_there_and_logits_come_back() -> None:
    nodes = [node("a", 64, gb_s=10), node("b", 64, gb_s=400)]
    here, there = (predicted(WIDE, nodes, ("a", 1), ("b", 39), head=head) for head in (False, True))

    assert here
    assert there
    logits = 4 * (150_000 - 5120) / QUIC_BYTES_PER_S
    assert 1 / here.tok_s - 1 / there.tok_s == pytest.approx(0.4 / 10 - 0.4 / 400 - logits)


def test_a_tied_head_is_read_all_the_same() -> None:
    found = predicted(replace(WIDE, head_bytes=0), [node("a", 64, gb_s=50)], ("a", 40))

    assert found
    assert 1 / found.tok_s == pytest.approx(20.3 / 50)


def test_layers_that_spill_out_of_a_gpu_are_read_slowly() -> None:
    """24 GB hold all of it, 12.4 GB and a little for scratch memory 22 or so."""
    whole, part = (
        predicted(WIDE, [node("a", 64, gb_s=1000, gpus=(gpu(size),))], ("a", 40)) for size in (24, 12.4)
    )

    assert whole
    assert part
    assert whole.tok_s == pytest.approx(1000 / 20.4)
    spilled = (1 / part.tok_s - 1 / whole.tok_s) / (1 / SPILL_BYTES_PER_S - 1 / (1000 * GB)) / (GB // 2)
    assert round(spilled) == pytest.approx(spilled, abs=1e-6)
    assert 16 <= spilled <= 20


def test_gpu_layers_bounds_what_lies_there() -> None:
    found = predicted(WIDE, [node("a", 64, gb_s=1000, gpus=(gpu(24),), gpu_layers=10)], ("a", 40))

    assert found
    assert 1 / found.tok_s == pytest.approx(5.4 / 1000 + 15 / 40)


def test_no_speed_no_prediction() -> None:
    assert predicted(WIDE, [node("a", 64, gb_s=None)], ("a", 40)) is None
    assert predicted(WIDE, [node("a", 64), node("b", 64, gb_s=None)], ("a", 20), ("b", 20)) is None
    assert predicted(WIDE, [node("a", 64)], ("a", 20), ("gone", 20)) is None


def test_a_mixture_reads_the_experts_it_uses() -> None:
    """Attention 1 part in 4 of the elements; 8 of 64 experts."""
    experts = {"experts": 64, "experts_used": 8, "expert_feed_forward": 1000, "feed_forward": 0}
    attention = 3 * 64 * 1000 // 3
    facts = model(4, GB, query_elements=attention - 2048, **experts)
    layer = facts.layers[0]

    assert active_bytes(facts, layer, GB) == pytest.approx(GB / 4 + 3 * GB / 4 / 8)
    dense = replace(layer, weight_bytes=GB // 4)
    assert active_bytes(facts, dense, GB) == GB // 4
    assert active_bytes(model(4, GB), layer, GB) == GB
    some = predicted(facts, [node("a", 64, gb_s=50)], ("a", 4))
    all_of_it = predicted(model(4, GB), [node("a", 64, gb_s=50)], ("a", 4))
    assert some
    assert all_of_it
    assert some.tok_s > 2 * all_of_it.tok_s


def test_prompts_are_paced_by_the_slowest_stage() -> None:
    """Two equal machines: four micro-batches over two stages at 4/5 of the ideal, links aside."""
    fast_link = {"b": 0.001}
    one = predicted(WIDE, [node("a", 64)], ("a", 40))
    two = predicted(WIDE, [node("a", 64, links=fast_link), node("b", 64)], ("a", 20), ("b", 20))
    same = predicted(WIDE, [node("a", 64, machine="m"), node("b", 64, machine="m")], ("a", 20), ("b", 20))

    assert one
    assert two
    assert same
    alone = one.first_token_s - HEAD_S
    together = two.first_token_s - HEAD_S
    transfer = 512 * 4 * 5120 / QUIC_BYTES_PER_S
    assert together == pytest.approx(alone / 2 * 5 / 4 + transfer / 4, rel=0.01)
    assert same.first_token_s - HEAD_S > 0.99 * alone


def test_a_slow_line_paces_prompts_too() -> None:
    nodes = [node("a", 64, gb_s=4000), node("b", 64, gb_s=4000)]
    quick = predicted(WIDE, nodes, ("a", 20), ("b", 20))
    slow_nodes = [
        replace(
            each,
            facts=replace(
                each.facts,
                links=tuple((to, replace(link, kind=LinkKind.RELAY)) for to, link in each.facts.links),
            ),
        )
        for each in mesh(*nodes).nodes
    ]
    slow = predicted(WIDE, slow_nodes, ("a", 20), ("b", 20))

    assert quick
    assert slow
    assert quick.first_token_s < 512 * 4 * 5120 / RELAY_BYTES_PER_S < slow.first_token_s


def test_a_longer_prompt_takes_longer_and_a_short_one_hardly_more_than_a_token() -> None:
    inputs = mesh(node("a", 64))

    def first_token_s(tokens: int) -> float:
        found = predict(
            WIDE, stages(("a", 40)), inputs, host=NodeId("a"), settings=CACHE, prompt_tokens=tokens
        )
        assert found
        return found.first_token_s - HEAD_S

    usual = predicted(WIDE, [node("a", 64)], ("a", 40))
    assert usual
    assert first_token_s(512) == pytest.approx(usual.first_token_s - HEAD_S)
    assert first_token_s(1024) > 2 * first_token_s(512)
    # All weights are read once, and no link is crossed.
    assert first_token_s(1) == pytest.approx(1 / usual.tok_s - HEAD_S)


WIDE_ELEMENTS = 40 * 5120 * (2 * 64 * 128 + 2 * 1024 + 3 * 25_600)


def prompt_s(facts: ModelFacts, tokens: int) -> float:
    """On one that multiplies a teraflop a second and attends a tenth of it."""
    slow = Speed(read_bytes_per_s=50e9, flops_per_s=1e12, attention_per_s=1e11)
    alone = node("a", 64)
    found = predict(
        facts,
        stages(("a", 40)),
        mesh(replace(alone, facts=replace(alone.facts, speed=slow))),
        host=NodeId("a"),
        settings=CACHE,
        prompt_tokens=tokens,
    )
    assert found
    return found.first_token_s - 0.4 / 50


def with_caches(cache: LayerCache, count: int) -> ModelFacts:
    """`count` layers of the wide model keep that."""
    layers = tuple(replace(layer, cache=cache) for layer in WIDE.layers[:count])
    return replace(WIDE, layers=layers + WIDE.layers[count:])


def test_each_token_of_a_prompt_attends_to_half_of_it_on_average() -> None:
    products_s = 2 * WIDE_ELEMENTS / 1e12
    attention_s = 40 * 4 * 64 * 128 * 2000 / 1e11

    assert prompt_s(WIDE, 4000) == pytest.approx(4000 * (products_s + attention_s))


def test_a_window_bounds_what_a_token_attends_to() -> None:
    windowed = with_caches(LayerCache(k_width=1024, v_width=1024, window=1000), 30)
    attended = 40 * 4 * 64 * 128 / 1e11

    assert prompt_s(windowed, 1000) == pytest.approx(prompt_s(WIDE, 1000))
    # In 30 of 40 layers the first thousand attend to 500 each, the others to a thousand.
    mean = (1000 * 500 + 3000 * 1000) / 4000
    saved = 4000 * 30 / 40 * attended * (2000 - mean)
    assert prompt_s(WIDE, 4000) - prompt_s(windowed, 4000) == pytest.approx(saved)


def test_layers_without_keys_attend_to_nothing() -> None:
    recurrent = with_caches(LayerCache(state_bytes=1000), 40)

    assert prompt_s(recurrent, 4000) == pytest.approx(4 * prompt_s(recurrent, 1000))


def test_long_prompts_are_read_as_fast_as_their_first_token_comes() -> None:
    found = predicted(WIDE, [node("a", 64)], ("a", 40))
    long = predict(
        WIDE,
        stages(("a", 40)),
        mesh(node("a", 64)),
        host=NodeId("a"),
        settings=CACHE,
        prompt_tokens=LONG_PROMPT_TOKENS,
    )

    assert found
    assert long
    assert found.prompt_tok_s == pytest.approx(LONG_PROMPT_TOKENS / (long.first_token_s - HEAD_S))


def test_a_prompt_of_one_batch_passes_its_stages_one_after_the_other() -> None:
    nodes = [node("a", 64), node("b", 64)]
    found = predict(
        WIDE,
        stages(("a", 20), ("b", 20)),
        mesh(*nodes),
        host=NodeId("a"),
        settings=CACHE,
        prompt_tokens=128,
    )
    alone = predict(
        WIDE, stages(("a", 40)), mesh(*nodes), host=NodeId("a"), settings=CACHE, prompt_tokens=128
    )

    assert found
    assert alone
    assert found.first_token_s > alone.first_token_s
