"""Several models over one mesh: each is planned with what the others leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.planning.decide import decide
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.planning.other_models import without
from mesh_llm.planning.shared_machines import part_of
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import HostingMode, Kernel, KernelSpeed, Mode, NodeId, Plan, Speed
from tests.support.planning import GB, gpu, lending, model, node, settings

BIG, SMALL = model(), model(layers=10)


def snapshot(*nodes: Candidate) -> Snapshot:
    return Snapshot(nodes=nodes)


def plan(mesh: Snapshot, of: object = BIG, **options: object) -> Plan:
    return decide(mesh, of, settings(**options), current=None)  # type: ignore[arg-type]


def free(mesh: Snapshot, name: str) -> int:
    found = mesh.node(NodeId(name))
    assert found is not None
    return usable_bytes(found.facts)


def test_nothing_is_taken_where_nothing_runs() -> None:
    mesh = snapshot(node("ann", 30))
    assert without(mesh, ()) is mesh


def test_a_second_model_goes_where_there_is_room() -> None:
    mesh = snapshot(node("ann", 26, gb_s=50), node("ben", 26, gb_s=40))
    first = plan(mesh)
    assert (first.mode, first.host) == (Mode.SOLO, "ann")
    second = plan(without(mesh, [first]))
    assert (second.mode, second.host) == (Mode.SOLO, "ben")


def test_a_second_model_is_split_over_what_is_left() -> None:
    mesh = snapshot(node("ann", 36, gb_s=50), node("ben", 14))
    first = plan(mesh)
    assert first.host == "ann"
    second = plan(without(mesh, [first]))
    assert (second.mode, {stage.node for stage in second.stages}) == (Mode.SPLIT, {"ann", "ben"})
    assert (
        sum(stage.need_bytes for stage in second.stages if stage.node == "ann") < 36 * GB - first.need_bytes
    )


def test_a_third_model_waits_with_the_figures_of_what_is_left() -> None:
    mesh = snapshot(node("ann", 26), node("ben", 26))
    first = plan(mesh)
    second = plan(without(mesh, [first]))
    third = plan(without(mesh, [first, second]))
    assert third.mode is Mode.WAITING
    assert third.have_bytes < third.need_bytes


def test_memory_that_nodes_share_is_taken_once_from_all_of_them() -> None:
    mesh = snapshot(node("ann", 40, machine="desk"), node("ben", 40, machine="desk"))
    first = plan(mesh)
    left = without(mesh, [first])
    both = [found.facts.machine_memory_bytes for found in left.nodes]
    assert both == [40 * GB - first.need_bytes] * 2
    assert free(left, first.host or "") == 40 * GB - first.need_bytes


def test_a_host_fills_its_gpus_first() -> None:
    mesh = snapshot(node("ann", 30, gpus=(gpu(16),)))
    left = without(mesh, [plan(mesh)]).nodes[0].facts
    assert left.gpus[0].free_bytes < GB  # whole layers
    assert 20 * GB < left.memory_bytes < 30 * GB


def test_what_a_gpu_has_of_main_memory_is_taken_from_both() -> None:
    mesh = snapshot(node("mac", 32, gpus=(gpu(25, "MTL0"),)))
    first = plan(mesh)
    assert first.mode is Mode.SOLO
    assert free(without(mesh, [first]), "mac") <= 32 * GB - first.need_bytes
    assert plan(without(mesh, [first])).mode is Mode.WAITING


def test_a_workers_device_is_taken_by_name() -> None:
    gpus = (gpu(16), gpu(16, "CUDA1"))
    mesh = snapshot(node("ann", 12), lending(node("ben", 12, gpus=gpus, hosting=HostingMode.NEVER)))
    split = plan(mesh, split=True)
    worked = {stage.device: stage.need_bytes for stage in split.stages if stage.node == "ben"}
    before = {each.name: each.bytes for each in mesh.nodes[1].facts.devices}
    after = {each.name: each.bytes for each in without(mesh, [split]).nodes[1].facts.devices}
    assert worked
    assert after == {name: size - worked.get(name, 0) for name, size in before.items()}


def test_what_a_node_may_use_at_most_counts_for_all_models_together() -> None:
    mesh = snapshot(node("ann", 60, max_memory_bytes=40 * GB))
    first = plan(mesh)
    assert free(without(mesh, [first]), "ann") == 40 * GB - first.need_bytes
    assert plan(without(mesh, [first])).mode is Mode.WAITING


def test_a_model_prefers_machines_on_which_no_model_before_it_computes() -> None:
    mesh = snapshot(node("ann", 60, gb_s=50), node("ben", 60, gb_s=40))
    first = plan(mesh)
    assert plan(without(mesh, [first])).host == "ann"
    assert plan(without(mesh, [first], before=[first])).host == "ben"


def test_a_machine_that_computes_is_slower_with_a_models_own_types_too() -> None:
    speed = Speed(
        read_bytes_per_s=50e9,
        flops_per_s=4e12,
        attention_per_s=1e12,
        kernels=(
            KernelSpeed(kernel=Kernel(kind="q4_1", width=4096), read_bytes_per_s=40e9, flops_per_s=6e11),
        ),
    )
    mesh = snapshot(node("ann", 60, speed=speed, gb_s=None))
    left = without(mesh, [], before=[plan(mesh)]).nodes[0].facts.speed
    assert left is not None
    assert left == part_of(speed, 0.5)
    assert (left.kernels[0].read_bytes_per_s, left.kernels[0].flops_per_s) == (20e9, 3e11)


@pytest.mark.parametrize(
    ("machine", "slowed"),
    [
        ({"cores": 8}, 1),
        ({"threads": 4, "machine_threads": 8}, 1),
        ({"threads": 8, "machine_threads": 8}, 2),
        ({"threads": 0, "machine_threads": 8}, 2),
        ({"cores": 0, "gpus": (gpu(40),)}, 2),
    ],
    ids=["threads shared out", "threads for both", "the same threads", "nobody knows", "a GPU"],
)
def test_a_model_on_another_node_of_a_machine_slows_by_what_they_share(
    machine: dict[str, Any], slowed: float
) -> None:
    both = [node(name, 60, machine="desk", **machine) for name in ("ann", "ben")]
    mesh = snapshot(*both)
    first = plan(mesh)
    other = next(each for each in without(mesh, [], before=[first]).nodes if each.id != first.host)
    assert both[0].facts.speed is not None
    assert other.facts.speed == part_of(both[0].facts.speed, 1 / slowed)


def test_a_model_stays_where_it_is_when_another_one_comes() -> None:
    mesh = snapshot(node("ann", 60, gb_s=50), node("ben", 60, gb_s=48))
    first = plan(mesh)
    second = plan(without(mesh, [first], before=[first]), SMALL)
    again = plan(without(mesh, [second]))
    assert again.key == first.key


def test_a_plan_is_valid_beside_the_models_that_it_was_made_beside() -> None:
    mesh = snapshot(node("ann", 36, gb_s=50), node("ben", 14))
    first = plan(mesh)
    left = without(mesh, [first])
    second = plan(left)
    assert plan(without(mesh, [second])).key == first.key
    assert plan(without(mesh, [first])).key == second.key
    assert replace(left.nodes[0], facts=mesh.nodes[0].facts) == mesh.nodes[0]


def test_experts_are_taken_from_main_memory() -> None:
    mixture = replace(
        BIG, layers=tuple(replace(layer, expert_bytes=layer.weight_bytes * 9 // 10) for layer in BIG.layers)
    )
    mesh = snapshot(node("ann", 60, gpus=(gpu(24),), cpu_moe=1000))
    left = without(mesh, [plan(mesh, mixture)]).nodes[0].facts
    assert left.memory_bytes < 45 * GB
    assert left.gpus[0].free_bytes > 15 * GB


def test_layers_beyond_the_bound_of_a_gpu_are_taken_from_main_memory() -> None:
    mesh = snapshot(node("ann", 60, gpus=(gpu(24),), gpu_layers=2))
    left = without(mesh, [plan(mesh)]).nodes[0].facts
    assert left.memory_bytes < 45 * GB
    assert left.gpus[0].free_bytes > 15 * GB
