"""Who hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_llm.planning.decide import decide
from mesh_llm.planning.election import solo_hosts, split_hosts
from mesh_llm.planning.memory_layout import rooms
from mesh_llm.planning.snapshot import Candidate, Snapshot, listing
from mesh_llm.types import HostingMode, LinkFacts, LinkKind, Mode, NodeId
from tests.support.planning import gpu, link, mesh, model, node, reasons, settings

SMALL = model(10, 100_000_000)
"""1 GB and a little: fits on everything below."""


def order(*nodes: Candidate) -> list[str]:
    return [each.id for each in split_hosts(nodes, rooms(nodes).hosting)]


def test_for_a_split_gpu_memory_then_memory_then_id() -> None:
    assert order(node("a", 8), node("b", 64), node("c", 8, gpus=(gpu(24),))) == ["c", "b", "a"]
    assert order(node("b", 8), node("a", 8)) == ["a", "b"]
    assert order(node("a", 8, gpus=(gpu(8),)), node("b", 4, gpus=(gpu(8), gpu(1, "CUDA1")))) == ["b", "a"]


def test_who_prefers_comes_first_whatever_it_has() -> None:
    tiny = node("z", 1, hosting=HostingMode.PREFER)

    assert order(node("a", 64, gpus=(gpu(24),)), tiny) == ["z", "a"]
    seconds = {NodeId("a"): 0.01, NodeId("z"): 9.0}
    both = (node("a"), tiny)
    assert [each.id for each in solo_hosts(both, rooms(both).hosting, seconds)] == ["z", "a"]


def test_an_engine_that_cannot_split_is_not_elected_for_one() -> None:
    assert order(node("a", 64, splits=False), node("b", 8)) == ["b"]


def test_solo_goes_to_the_fastest_not_to_the_largest() -> None:
    plan = decide(mesh(node("a", 64, gb_s=20), node("b", 8, gb_s=80)), SMALL, settings(), current=None)

    assert (plan.mode, plan.host) == (Mode.SOLO, "b")
    assert plan.reason == "fits on b alone, the fastest of 2 nodes that hold it"
    assert plan.predicted


@pytest.mark.parametrize("unknown", ["a", "b"])
def test_without_a_speed_memory_decides(unknown: str) -> None:
    nodes = [node("a", 8, gb_s=80), node("b", 64, gb_s=20)]
    nodes = [
        replace(each, facts=replace(each.facts, speed=None)) if each.id == unknown else each for each in nodes
    ]

    plan = decide(mesh(*nodes), SMALL, settings(), current=None)

    assert plan.host == "b"
    assert plan.reason == "fits on b alone, the largest of 2 nodes that hold it"
    assert (plan.predicted is None) == (unknown == "b")


def test_solo_ties_go_to_gpu_memory_then_memory_then_id() -> None:
    def host(*nodes: Candidate) -> NodeId | None:
        return decide(mesh(*nodes), SMALL, settings(), current=None).host

    assert host(node("b", 8), node("a", 8)) == "a"
    assert host(node("b", 16), node("a", 8)) == "b"
    assert host(node("a", 64), node("b", 8, gpus=(gpu(8),))) == "b"


def test_never_is_never_and_nobody_left_waits() -> None:
    never = node("a", 64, gb_s=900, hosting=HostingMode.NEVER)

    assert decide(mesh(never, node("b", 8)), SMALL, settings(), current=None).host == "b"
    alone = decide(mesh(never), SMALL, settings(), current=None)
    assert alone.mode is Mode.WAITING
    assert alone.reason == "no node that has the model may host: all have --hosting never"
    assert reasons(alone) == {"a": "waiting: there is no plan yet"}


def test_never_still_computes() -> None:
    plan = decide(
        mesh(node("a", 12, hosting=HostingMode.NEVER), node("b", 12)), model(), settings(), current=None
    )

    assert (plan.mode, plan.host) == (Mode.SPLIT, "b")
    assert [stage.node for stage in plan.stages] == ["b", "a"]


def test_who_has_no_model_file_does_not_host() -> None:
    plan = decide(mesh(node("a", 64, models=()), node("b", 8)), SMALL, settings(), current=None)

    assert plan.host == "b"
    assert reasons(plan) == {"a": "no such model file"}


def test_a_tiny_host_that_is_preferred_and_cannot_is_passed_over() -> None:
    """It has no room for the embedding, not to speak of a layer."""
    plan = decide(
        mesh(node("a", 0.2, hosting=HostingMode.PREFER), node("b", 12), node("c", 12)),
        model(),
        settings(),
        current=None,
    )

    assert (plan.host, plan.mode) == ("b", Mode.SPLIT)


def test_listing_has_the_host_first_then_ids() -> None:
    ids = [NodeId(name) for name in "dacb"]

    assert listing(NodeId("c"), ids) == ("c", "a", "b", "d")
    assert listing(None, ids) == ("a", "b", "c", "d")


def test_a_link_is_what_the_worse_side_says() -> None:
    one = node("a", links={"b": 5}, machine="")
    there = LinkFacts(kind=LinkKind.RELAY, rtt_s=0.02)
    other = node("b", machine="")
    other = replace(other, facts=replace(other.facts, links=((NodeId("a"), there),)))
    snapshot = Snapshot(nodes=(other, one, node("c")))

    assert snapshot.link(NodeId("a"), NodeId("b")) == there
    assert snapshot.link(NodeId("b"), NodeId("a")) == there
    assert Snapshot(nodes=(one,)).link(NodeId("b"), NodeId("a")) == link(5)
    assert snapshot.link(NodeId("a"), NodeId("c")) is None


@pytest.mark.parametrize("rtt_ms", [float("nan"), float("inf"), -1.0])
def test_a_delay_that_is_none_is_not_believed(rtt_ms: float) -> None:
    assert Snapshot(nodes=(node("a", links={"b": rtt_ms}),)).link(NodeId("a"), NodeId("b")) is None


def test_nodes_of_one_machine_are_linked() -> None:
    snapshot = Snapshot(nodes=(node("a", machine="m"), node("b", machine="m")))
    found = snapshot.link(NodeId("a"), NodeId("b"))

    assert found
    assert found.kind is LinkKind.LOCAL


def test_who_has_the_projector_comes_before_who_has_more_memory() -> None:
    nodes = [node("a", 30), node("b", 20), node("c", 10, hosting=HostingMode.PREFER)]
    found = split_hosts(nodes, rooms(nodes).hosting, lacking={NodeId("a"), NodeId("c")})
    assert [each.id for each in found] == ["c", "b", "a"]
    seconds = {each.id: 1.0 for each in nodes}
    alone = solo_hosts(nodes, rooms(nodes).hosting, seconds, lacking={NodeId("a")})
    assert [each.id for each in alone] == ["c", "b", "a"]
