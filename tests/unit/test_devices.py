"""Workers that lend several devices: which of them get layers, and in what order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.planning.cuts import MAX_DEVICES
from mesh_llm.planning.decide import decide
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import HostingMode, Mode, Plan
from tests.support.planning import (
    GB,
    counts,
    devices,
    gpu,
    lending,
    mesh,
    model,
    node,
    reasons,
    running,
    settings,
)


def worker(name: str, *gpus: float, gb: float = 32, **changes: Any) -> Candidate:
    """With GPUs of so many GB, 900 GB/s, and main memory of 30 GB/s."""
    found = tuple(gpu(size, f"CUDA{index}") for index, size in enumerate(gpus))
    never = {"hosting": HostingMode.NEVER, "gpus": found, "gb_s": 900}
    return lending(node(name, gb, **{**never, **changes}), CPU=30)


def planned(*nodes: Candidate, **changes: Any) -> Plan:
    return decide(mesh(*nodes), model(), settings(**changes), current=None)


def test_gpus_are_filled_before_main_memory_which_takes_the_rest() -> None:
    plan = planned(node("a", 3), worker("b", 8, 6))

    first, second, rest = devices(plan)[-3:]
    assert [first[:2], second[:2], rest[:2]] == [("b", "CUDA0"), ("b", "CUDA1"), ("b", "CPU")]
    assert first[2] > second[2] > rest[2] > 0


def test_a_device_that_is_not_needed_has_no_stage() -> None:
    assert devices(planned(node("a", 3), worker("b", 30, 30)))[-1][:2] == ("b", "CUDA0")
    assert {device for _, device, _ in devices(planned(node("a", 3), worker("b", 14, 14)))} == {
        "CUDA0",
        "CUDA1",
    }


def test_the_gpus_of_all_nodes_come_before_main_memory() -> None:
    plan = planned(node("a", 3), worker("b", 8, gb=8), worker("c", 14, gb=4))

    assert [device for _, device, _ in devices(plan) if device] == ["CUDA0", "CUDA0"]


def test_another_node_with_a_gpu_is_worth_more_than_main_memory() -> None:
    """One worker would hold it, at a tenth of the speed."""
    plan = planned(node("a", 3, gb_s=10), worker("b", 14, gb=64), worker("c", 14))

    assert plan.reason == "no node holds it alone; 3 nodes do, workers on their GPUs"
    assert [device for _, device, _ in devices(plan) if device] == ["CUDA0", "CUDA0"]


def test_devices_of_a_node_stay_together() -> None:
    plan = planned(node("a", 3), worker("b", 4, 4, gb=4), worker("c", 4, 4, gb=4), worker("d", 4, 4, gb=4))

    names = [stage.node for stage in plan.stages]
    assert len(names) > 4
    assert names == sorted(names, key=names.index)


def test_split_takes_every_gpu_and_no_main_memory_beside_one() -> None:
    plan = planned(node("a", 40), worker("b", 24, 24), node("c", 30), split=True)

    assert sorted((name, device) for name, device, _ in devices(plan)) == [
        ("a", ""),
        ("b", "CUDA0"),
        ("b", "CUDA1"),
        ("c", ""),
    ]
    small = planned(node("a", 3), worker("b", 4, 4), split=True)
    assert {device for _, device, _ in devices(small)} == {"CUDA0", "CUDA1", "CPU"} | (
        {""} if "a" in counts(small) else set()
    )


def test_a_bound_on_memory_is_one_for_all_devices() -> None:
    bounded = worker("b", 8, 8, max_memory_bytes=12 * GB)

    assert [(each.name, each.bytes) for each in bounded.facts.devices] == [
        ("CUDA0", 8 * GB),
        ("CUDA1", 4 * GB),
    ]
    plan = planned(node("a", 12), bounded)
    assert sum(stage.need_bytes for stage in plan.workers) <= 12 * GB
    assert planned(node("a", 8), bounded).mode is Mode.WAITING


@pytest.mark.parametrize("own", [(), (3, 3)])
@pytest.mark.parametrize("split", [True, False])
def test_no_more_devices_than_the_engine_knows(own: tuple[float, ...], split: bool) -> None:
    host = lending(node("a", 3, gpus=tuple(gpu(size, f"CUDA{n}") for n, size in enumerate(own))))
    others = [worker(f"b{index}", 2.5, 2.5, gb=2.5) for index in range(8)]

    plan = planned(host, *others, split=split)

    assert plan.mode is Mode.SPLIT
    assert len(others) * split < len(plan.workers) <= MAX_DEVICES - len(own)


def test_layers_of_a_node_fill_its_devices_one_after_the_other() -> None:
    nodes = (node("a", 30), worker("b", 6, 30))
    layers = (("a", 0, 10), ("b", 10, 40))

    plan = planned(*nodes, layers=layers)

    assert [name for name, _, _ in devices(plan)] == ["a", "b", "b"]
    assert [stage.device for stage in plan.stages] == ["", "CUDA0", "CUDA1"]
    assert (plan.stages[1].first, plan.stages[2].last) == (10, 40)
    assert decide(mesh(*nodes), model(), settings(layers=layers), current=running(plan)) == plan
    halves = planned(*nodes, tensor_split=(1.0, 1.0))
    assert decide(mesh(*nodes), model(), settings(tensor_split=(1.0, 1.0)), current=running(halves)) == halves
    assert sum(count for name, _, count in devices(halves) if name == "b") == 20
    short = planned(node("a", 30), worker("b", 6, 6, gb=1), layers=layers)
    assert short.mode is Mode.WAITING
    assert short.reason.endswith("on b (CPU), which lends 1.0 GB")


def test_a_plan_is_kept_while_its_devices_are_lent() -> None:
    nodes = (node("a", 3), worker("b", 14, 14))
    plan = planned(*nodes)

    assert decide(mesh(*nodes), model(), settings(), current=running(plan)).key == plan.key
    fewer = replace(nodes[1], facts=replace(nodes[1].facts, devices=nodes[1].facts.devices[1:]))
    after = decide(mesh(nodes[0], fewer), model(), settings(), current=running(plan))
    assert {stage.device for stage in after.workers} == {"CUDA1", "CPU"}


def test_two_gpus_read_prompts_side_by_side() -> None:
    one, two = (planned(node("a", 3), worker("b", *sizes)) for sizes in ((30.0,), (14.0, 14.0)))

    assert one.predicted is not None
    assert two.predicted is not None
    assert two.predicted.tok_s == pytest.approx(one.predicted.tok_s, rel=0.1)
    assert two.predicted.prompt_tok_s > 1.5 * one.predicted.prompt_tok_s


def test_a_host_lends_itself_nothing() -> None:
    both = lending(node("a", 40, gpus=(gpu(4), gpu(4, "CUDA1"))), CPU=30)

    plan = decide(Snapshot(nodes=(both,)), model(), settings(split=True), current=None)

    assert (plan.mode, devices(plan), reasons(plan)) == (Mode.SOLO, [("a", "", 40)], {})
