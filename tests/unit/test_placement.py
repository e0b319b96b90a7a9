"""Which nodes compute which layers: sets, orders, shares, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import CacheSettings, compute_bytes, memory_need, stage_need
from mesh_llm.planning.layer_costs import load_of
from mesh_llm.planning.layer_shares import Capacity, apportion, fastest_first, spread
from mesh_llm.planning.manual_layers import has_first_layers
from mesh_llm.planning.memory_layout import Free, Ledger, divided, furthest, lodge, rooms, total_bytes
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import HostingMode, LayerCache, Mode, NodeFacts, NodeId, Plan, Role
from tests.support.planning import (
    GB,
    any_model,
    counts,
    gpu,
    layers,
    mesh,
    model,
    node,
    reasons,
    settings,
)

CACHE = CacheSettings(context=4096, slots=1)


def planned(*nodes: Candidate, **wishes: Any) -> Plan:
    return decide(mesh(*nodes), model(), settings(**wishes), current=None)


# -- shares --


@pytest.mark.parametrize(
    ("total", "ratios", "expected"),
    [
        (30, (1, 1, 1), [10, 10, 10]),
        (31, (1, 1, 1), [11, 10, 10]),
        (32, (1, 1, 1), [11, 11, 10]),
        (10, (0, 1), [0, 10]),
        (10, (1, 0, 3), [3, 0, 7]),
        (1, (1, 1, 5), [0, 0, 1]),
        (47, (0.3, 0.3, 0.4), [14, 14, 19]),
    ],
)
def test_ratios_are_rounded_exactly(total: int, ratios: Sequence[float], expected: list[int]) -> None:
    assert apportion(total, ratios) == expected


def test_no_rounding_loses_a_layer() -> None:
    random = Random(1)
    for _ in range(2000):
        ratios = [
            random.choice([0, random.random(), random.randint(1, 9)]) for _ in range(random.randint(1, 9))
        ]
        if sum(ratios):
            total = random.randint(1, 120)
            found = apportion(total, ratios)
            assert sum(found) == total
            assert all(
                abs(count - total * ratio / sum(ratios)) < 1
                for count, ratio in zip(found, ratios, strict=True)
            )


def test_the_fastest_memory_is_filled_first() -> None:
    nodes = [Capacity(gpu=0, total=20), Capacity(gpu=10, total=30), Capacity(gpu=0, total=20)]
    rates = [(30.0, 30.0), (900.0, 40.0), (50.0, 50.0)]

    assert fastest_first(10, nodes, rates, [0, 0, 0]) == [0, 10, 0]
    assert fastest_first(25, nodes, rates, [0, 0, 0]) == [0, 10, 15]
    assert fastest_first(60, nodes, rates, [0, 0, 0]) == [10, 30, 20]
    assert fastest_first(10, nodes, rates, [1, 1, 1]) == [1, 8, 1]


def test_spreading_equalises_times_within_memory() -> None:
    roomy = [Capacity(gpu=0, total=99)] * 3

    assert spread(40, roomy, [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0)]) == [10, 10, 20]
    assert spread(40, [Capacity(gpu=0, total=2), *roomy[:2]], [(9.0, 9.0)] * 3) == [2, 19, 19]
    assert spread(3, roomy, [(1.0, 1.0), (1.0, 1.0), (99.0, 99.0)]) == [1, 1, 1]
    assert spread(12, [Capacity(gpu=4, total=99), roomy[0]], [(100.0, 1.0), (1.0, 1.0)]) == [8, 4]


# -- memory --


def test_a_stage_needs_its_layers_cache_and_scratch() -> None:
    facts = model()
    need = stage_need(facts, CACHE, (10, 20), host=False, head=False)

    assert need.weight_bytes == 5 * GB
    assert need.cache_bytes == 10 * 4096 * 2048 * 2
    assert need.compute_bytes == compute_bytes(facts, CACHE, logits=False) < compute_bytes(facts, CACHE)
    assert stage_need(facts, CACHE, (0, 40), host=True, head=True) == memory_need(facts, CACHE)
    assert stage_need(facts, CACHE, (30, 40), host=False, head=True).weight_bytes == 5 * GB + 400_000_000
    tied = model(head_bytes=0)
    assert stage_need(tied, CACHE, (30, 40), host=False, head=True).weight_bytes == 5 * GB + 300_000_000
    assert stage_need(tied, CACHE, (0, 1), host=True, head=True).weight_bytes == GB // 2 + 300_020_000


def test_checkpoints_of_recurrent_layers_are_counted() -> None:
    plain, two = model(), replace(CACHE, slots=2)
    state = replace(plain.layers[0], cache=LayerCache(state_bytes=1000))
    hybrid = replace(plain, layers=(*[state] * 10, *plain.layers[10:]))

    assert stage_need(hybrid, two, (0, 10), host=False, head=False).cache_bytes == (1 + 4) * 2 * 10 * 1000
    assert stage_need(hybrid, two, (0, 40), host=True, head=True) == memory_need(hybrid, two)
    taken = load_of(hybrid, two).sums
    assert taken[10] - taken[0] == sum(layer.weight_bytes for layer in hybrid.layers[:10]) + 5 * 2 * 10 * 1000


def test_what_reaches_furthest_fits_and_one_layer_more_does_not() -> None:
    random = Random(3)
    for _ in range(1000):
        load = load_of(any_model(random), CacheSettings(context=random.choice([256, 4096]), slots=2))
        free = Free(
            main_bytes=int(random.uniform(0, 20) * GB),
            gpu_bytes=int(random.choice([0, random.uniform(0, 20)]) * GB),
            gpu_layers=random.choice([0, 3, 1 << 30]),
            most_bytes=int(random.choice([1000, random.uniform(0, 30)]) * GB),
        )
        first, host = random.randint(0, load.count), random.random() < 0.5
        last = furthest(free, load, first, host=host, head=host)
        fits = [lodge(free, load, first, end, host=host, head=host) for end in range(first, load.count + 1)]
        if last is None:
            assert not any(fits)
            continue
        assert all(each is not None for each in fits[: last - first + 1])
        if last < load.count:
            assert fits[last - first + 1] is None
        found = fits[last - first]
        assert found
        assert found.main_bytes <= free.main_bytes
        assert found.gpu_bytes <= free.gpu_bytes
        assert found.main_bytes + found.gpu_bytes <= free.most_bytes
        assert found.on_gpu <= free.gpu_layers


def test_a_machine_is_counted_once() -> None:
    nodes = [node(name, 8, machine="m", machine_memory_bytes=10 * GB, gpus=(gpu(4),)) for name in "abc"]
    found = rooms(nodes).hosting

    assert total_bytes(found.values()) == 14 * GB
    parts = divided(found)
    assert sum(room.main_bytes for room in parts.values()) == 10 * GB
    assert {room.gpu_bytes for room in parts.values()} == {4 * GB // 3}
    ledger = Ledger()
    ledger.take(found[nodes[0].id], 7 * GB, 3 * GB)
    left = ledger.free(found[nodes[1].id])
    assert (left.main_bytes, left.gpu_bytes) == (3 * GB, GB)


def test_shared_machines_do_not_hold_what_each_of_their_nodes_could() -> None:
    """Two nodes of 12 GB on a machine with 15: not 24 GB."""
    shared = [node(name, 12, machine="m", machine_memory_bytes=15 * GB) for name in "ab"]

    waiting = planned(*shared)
    helped = planned(*shared, node("c", 12))

    assert waiting.mode is Mode.WAITING
    assert waiting.reason == "need 21.6 GB for the model, have 15.0 GB on 2 nodes"
    assert helped.mode is Mode.SPLIT
    assert len(helped.stages) == 2
    assert "c" in counts(helped)


def test_a_shared_gpu_is_shared() -> None:
    """Three nodes of a demonstration on one machine with one GPU: none gets more of it than another."""
    nodes = [
        node(name, 30, gb_s=900, machine="m", machine_memory_bytes=30 * GB, gpus=(gpu(24),)) for name in "abc"
    ]

    assert counts(planned(*nodes, split=True)) == {"a": 14, "b": 13, "c": 13}


def test_a_node_lends_no_more_than_its_limit() -> None:
    """--max-memory: 3 GB of a large machine, five layers and their scratch memory."""
    limited = node("b", 3, gb_s=900, machine_memory_bytes=64 * GB)
    plan = planned(node("a", 20), limited)

    assert counts(plan) == {"a": 35, "b": 5}
    assert plan.stages[1].need_bytes <= 3 * GB


def test_a_gpu_is_filled_before_main_memory_anywhere() -> None:
    """10 GB of GPU behind a link before 16 GB of main memory here."""
    plan = planned(node("a", 16, gb_s=40), node("b", 16, gb_s=900, gpus=(gpu(10),)))

    assert plan.host == "b"
    assert counts(plan)["b"] >= 17
    assert plan.predicted


def test_gpu_layers_none_means_its_main_memory() -> None:
    plan = planned(node("a", 4, gpus=(gpu(24),), gpu_layers=0), node("b", 20))

    assert plan.mode is Mode.SPLIT
    assert counts(plan)["a"] <= 7


# -- sets and orders --


def test_the_fewest_nodes_that_hold_it() -> None:
    plan = planned(*(node(name, 8) for name in "abcdef"), node("g", 14))

    assert plan.host == "g"
    assert len(plan.stages) == 2
    assert plan.reason == "no node holds it alone; 2 nodes do"


def test_of_equally_many_the_fastest_and_closest() -> None:
    far = node("b", 12, gb_s=80, links={"a": 200, "c": 200, "d": 200})
    slow = node("c", 12, gb_s=10)
    good = node("d", 12, gb_s=60)

    plan = planned(node("a", 12.1, gb_s=60), far, slow, good)

    assert set(counts(plan)) == {"a", "d"}
    assert reasons(plan)["b"].startswith("too slow a link: 200 ms would make it ")
    assert reasons(plan)["c"].startswith("would make it slower: ")


def test_a_slow_link_is_used_where_it_is_needed() -> None:
    plan = planned(node("a", 12), node("b", 12, links={"a": 300}))

    assert set(counts(plan)) == {"a", "b"}
    assert plan.predicted
    assert plan.predicted.tok_s < 1 / 0.3


def test_neighbours_are_close() -> None:
    """Two sites, 50 ms apart, two machines each: the way crosses between them twice, not four times."""
    at = {"a": 0, "b": 1, "c": 0, "d": 1}
    nodes = [
        node(name, 6.5, links={to: 0.5 if at[to] == at[name] else 50 for to in at if to != name})
        for name in at
    ]

    plan = planned(*nodes)

    order = [stage.node for stage in plan.stages]
    assert len(order) == 4
    crossings = sum(at[one] != at[other] for one, other in zip(order, [*order[1:], order[0]], strict=True))
    assert crossings == 2


def test_the_head_goes_to_a_much_faster_worker() -> None:
    slow_host = node("a", 12, gb_s=5, hosting=HostingMode.PREFER)

    assert planned(slow_host, node("b", 64, gb_s=900), split=True).head_on_worker
    assert not planned(node("a", 12, gb_s=40), node("b", 12, gb_s=40)).head_on_worker


def test_the_head_goes_to_a_worker_where_the_host_has_no_room_for_it() -> None:
    """4 GB of layers on each, 0.3 GB of embedding on one; the head of 0.4 GB lies where there is room."""
    large = model(layers=2, layer_bytes=4 * GB)

    def split(host_gb: float, worker_gb: float) -> Plan:
        nodes = node("a", host_gb), node("b", worker_gb, hosting=HostingMode.NEVER)
        return decide(mesh(*nodes), large, settings(), current=None)

    assert (counts(split(4.8, 5)), split(4.8, 5).head_on_worker) == ({"a": 1, "b": 1}, True)
    assert (counts(split(5, 4.5)), split(5, 4.5).head_on_worker) == ({"a": 1, "b": 1}, False)
    assert split(4.8, 4.5).mode is Mode.WAITING


@pytest.mark.parametrize("wish", [{"layers": (("a", 0, 1), ("b", 1, 2))}, {"tensor_split": (1.0, 1.0)}])
def test_the_head_of_layers_that_a_person_gave_goes_where_there_is_room_for_it(wish: dict[str, Any]) -> None:
    nodes = node("a", 4.8), node("b", 5, hosting=HostingMode.NEVER)
    plan = decide(mesh(*nodes), model(layers=2, layer_bytes=4 * GB), settings(**wish), current=None)

    assert (counts(plan), plan.head_on_worker) == ({"a": 1, "b": 1}, True)


@pytest.mark.parametrize("hosts", [8, 9])
def test_the_head_goes_to_a_worker_where_no_host_of_many_has_room_for_it(hosts: int) -> None:
    """Up to eight hosts are all compared; of more only some are tried."""
    small = [node(f"a{number}", 0.8) for number in range(hosts)]
    plan = decide(
        mesh(*small, node("b", 9, hosting=HostingMode.NEVER)),
        model(layers=2, layer_bytes=4 * GB),
        settings(),
        current=None,
    )

    assert (counts(plan), plan.head_on_worker) == ({"b": 2}, True)


def test_without_speeds_memory_and_id_decide() -> None:
    plan = planned(*(node(name, 12, gb_s=None) for name in "cba"), node("d", 13, gb_s=None))

    assert (plan.host, set(counts(plan)), plan.predicted) == ("d", {"a", "d"}, None)
    assert reasons(plan) == dict.fromkeys("bc", "not needed: the model fits on fewer nodes")


# -- --split --


def test_split_spreads_over_every_capable_node() -> None:
    plan = planned(node("a", 64, gb_s=40), node("b", 64, gb_s=80), node("c", 64, gb_s=40), split=True)

    assert plan.mode is Mode.SPLIT
    assert counts(plan) == {"a": 10, "b": 20, "c": 10}
    assert plan.reason == "--split: over all 3 nodes that can take part"
    assert plan.excluded == ()


def test_split_takes_a_small_node_for_what_it_can_hold() -> None:
    plan = planned(node("a", 64), node("b", 1.4), node("c", 0.5), split=True)

    assert counts(plan) == {"a": 38, "b": 2}
    assert reasons(plan) == {"c": "not enough memory: 500 MB free, a layer needs 741 MB"}


def test_split_with_more_nodes_than_layers() -> None:
    plan = decide(
        mesh(*(node(f"{index:02}", 8) for index in range(6))), model(4), settings(split=True), current=None
    )

    assert list(counts(plan).values()) == [1, 1, 1, 1]
    assert set(reasons(plan).values()) == {"not needed: the model has only 4 layers"}


def test_split_alone_is_solo() -> None:
    plan = planned(node("a", 64), node("b", 64, models=()), split=True)

    assert plan.mode is Mode.SOLO
    assert plan.reason == "fits on a alone; --split finds no other node that can take part"


# -- --tensor-split --


def test_tensor_split_counts_host_first_then_ids() -> None:
    nodes = [node("a", 64), node("b", 64), node("c", 65)]

    plan = planned(*nodes, tensor_split=(2.0, 1.0, 1.0))

    assert layers(plan) == {"c": (0, 20), "a": (20, 30), "b": (30, 40)}
    assert plan.reason == "as --tensor-split says"


@pytest.mark.parametrize(
    ("ratios", "expected", "mode"),
    [
        ((1.0, 0.0), {"a": 40}, Mode.SOLO),
        ((0.0, 1.0), {"b": 40}, Mode.SPLIT),
        ((0.0, 0.0, 1.0), {"c": 40}, Mode.SPLIT),
        ((0.0, 1.0, 1.0), {"b": 20, "c": 20}, Mode.SPLIT),
        ((3.0, 0.0, 1.0), {"a": 30, "c": 10}, Mode.SPLIT),
        ((1.0,), {"a": 40}, Mode.SOLO),
    ],
)
def test_zero_shares(ratios: tuple[float, ...], expected: dict[str, int], mode: Mode) -> None:
    plan = planned(*(node(name, 64) for name in "abc"), tensor_split=ratios)

    assert (plan.host, counts(plan), plan.mode) == ("a", expected, mode)
    without = set("abc") - set(expected) - {"a"}
    assert reasons(plan) == dict.fromkeys(without, "--tensor-split gives it no share")


@pytest.mark.parametrize(
    ("ratios", "reason"),
    [
        ((1.0, 1.0, 1.0), "--tensor-split names 3 nodes, 2 are here"),
        ((0.0, 0.0), "--tensor-split shares must be at least 0, and one of them above 0"),
        ((1.0, -1.0), "--tensor-split shares must be at least 0, and one of them above 0"),
        ((1.0, 9.0), "layers 4-39 need 18.8 GB on b, which lends 12.0 GB"),
    ],
)
def test_shares_that_cannot_be(ratios: tuple[float, ...], reason: str) -> None:
    plan = planned(node("a", 64), node("b", 12), tensor_split=ratios)

    assert plan.mode is Mode.WAITING
    assert plan.reason == reason


def test_a_host_without_layers_needs_room_for_embedding_and_head() -> None:
    plan = planned(node("a", 0.5, hosting=HostingMode.PREFER), node("b", 64), tensor_split=(0.0, 1.0))

    assert plan.mode is Mode.WAITING
    assert plan.reason.startswith("embedding and head need ")


# -- --layers --


def test_layers_are_where_they_are_told() -> None:
    wish = (("c", 0, 5), ("a", 15, 40), ("b", 5, 15))

    plan = planned(*(node(name, 64) for name in "abcd"), layers=wish)

    assert layers(plan) == {"c": (0, 5), "b": (5, 15), "a": (15, 40)}
    assert plan.host == "c"
    assert reasons(plan) == {"d": "--layers gives it no layers"}
    assert plan.reason == "as --layers says"


def test_a_first_layer_on_who_may_not_host_leaves_it_to_another() -> None:
    plan = planned(
        node("a", 64, hosting=HostingMode.NEVER),
        node("b", 64),
        node("c", 70),
        layers=(("a", 0, 10), ("b", 10, 40)),
    )

    assert (plan.host, layers(plan)) == ("c", {"a": (0, 10), "b": (10, 40)})


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ((("x", 0, 20), ("y", 20, 40)), "--layers names x, y: no such node is here"),
        ((("a", 0, 20), ("b", 21, 40)), "--layers b=21-39: layer 20 is missing"),
        ((("a", 0, 20), ("b", 19, 40)), "--layers b=19-39: layer 19 is given twice"),
        ((("a", 0, 20), ("b", 20, 39)), "--layers gives 39 layers, the model has 40"),
        ((("a", 0, 20), ("b", 20, 41)), "--layers gives 41 layers, the model has 40"),
        ((("a", 0, 20), ("twin", 20, 40)), "--layers names twin, and 2 nodes are called that: give an id"),
        ((("a", 0, 20), ("client", 20, 40)), "--layers names client, which has no part: no such model file"),
        (
            (("a", 0, 10), ("b", 10, 20), ("a", 20, 40)),
            "--layers gives a node two ranges; give each node one",
        ),
        ((("a", 0, 1), ("b", 1, 40)), "layers 1-39 need 20.4 GB on b, which lends 12.0 GB"),
    ],
)
def test_layers_that_cannot_be(wish: tuple[tuple[str, int, int], ...], reason: str) -> None:
    nodes = [
        node("a", 64),
        node("b", 12),
        node("c", 12),
        node("client", models=()),
    ]
    twins = [_called(node(name, 12), "twin") for name in "de"]

    plan = planned(*nodes, *twins, layers=wish)

    assert plan.mode is Mode.WAITING
    assert plan.reason == reason


def test_layers_by_a_name_that_others_take() -> None:
    """A node whose id is given is that one, and a lite client is none."""
    client = replace(
        _called(node("d", models=()), "b"), facts=NodeFacts(name="b", role=Role.CLIENT, version="1")
    )
    thief = _called(node("c", 64), "a")

    plan = planned(node("a", 64), node("b", 64), thief, client, layers=(("a", 0, 10), ("b", 10, 40)))

    assert (plan.host, layers(plan)) == ("a", {"a": (0, 10), "b": (10, 40)})


def test_who_has_the_first_layers_by_name_or_id() -> None:
    wish = ("zero", 0, 0), ("a", 0, 10), ("b", 10, 40)
    first = [name for name in ("zero", "a", "b") if has_first_layers(wish, NodeId("other"), name)]

    assert first == ["a"]
    assert has_first_layers(wish, NodeId("a"), "other")
    assert not has_first_layers(wish, NodeId("b"), "other")


def _called(each: Candidate, name: str) -> Candidate:
    return replace(each, facts=replace(each.facts, name=name))
