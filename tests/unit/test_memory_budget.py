"""What worker children are given is what plans count on, whatever a person asked of the node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine import machine
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import LinkRefused
from mesh_llm.host.worker_launch import worker_spec
from mesh_llm.local.hardware import Hardware, chosen, equipped, measured_as
from mesh_llm.planning.decide import decide
from mesh_llm.planning.memory_budget import lent_devices, lent_text, usable_bytes
from mesh_llm.planning.memory_layout import rooms
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Device, DeviceKind, HostingMode, Mode, NodeId, Place, Plan
from tests.support.planning import GB, counts, devices, gpu, mesh, model, node, reasons, settings

MAIN = 32 * GB
TWO = (gpu(8), gpu(8, "CUDA1"))
CPU = replace(gpu(64, "CPU"), kind=DeviceKind.CPU)
SHARED = replace(gpu(16, "Vulkan0"), kind=DeviceKind.INTEGRATED)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: MAIN)


def hardware(gpus: tuple[Device, ...], **options: Any) -> Hardware:
    config = NodeConfig(home=Path("/home"), **options)
    return equipped(config, {}, None, chosen(config, (CPU, *gpus)), None)


def told(worker: Hardware, device: str = "") -> WorkerSpec:
    """What the worker child of a device hears."""
    return worker_spec(NodeConfig(home=Path("/home")), worker, Path("socket"), device, nodes_here=1)


def member(worker: Hardware, **changes: Any) -> Candidate:
    """The same node, as others see it."""
    published = {**worker.facts(), "engine": node("b").facts.engine, "machine": "b", "speed": None}
    return node("b", **{**published, **changes})


def planned(*nodes: Candidate, **changes: Any) -> Plan:
    return decide(mesh(*nodes), model(), settings(**changes), current=None)


@pytest.mark.parametrize(
    ("gpus", "options", "lent"),
    [
        ((), {}, {"CPU": 32}),
        (TWO, {}, {"CUDA0": 8, "CUDA1": 8, "CPU": 32}),
        (TWO, {"devices": ("CUDA1", "CUDA0")}, {"CUDA1": 8, "CUDA0": 8}),
        (TWO, {"devices": ("CUDA1",)}, {"CUDA1": 8}),
        (TWO, {"devices": ("CUDA1", "CPU")}, {"CUDA1": 8, "CPU": 32}),
        (TWO, {"devices": ("none",)}, {"CPU": 32}),
        (TWO, {"devices": ("CPU",)}, {"CPU": 32}),
        (TWO, {"gpu_layers": 0}, {"CPU": 32}),
        (TWO, {"gpu_layers": 3}, {"CUDA0": 8, "CPU": 32}),
        ((gpu(24),), {"max_memory_bytes": 8 * GB}, {"CUDA0": 8}),
        ((gpu(24),), {"max_memory_bytes": 8 * GB, "gpu_layers": 0}, {"CPU": 8}),
        ((gpu(24),), {"max_memory_bytes": 30 * GB}, {"CUDA0": 24, "CPU": 6}),
        (TWO, {"max_memory_bytes": 12 * GB}, {"CUDA0": 8, "CUDA1": 4}),
        ((gpu(20, "MTL0"),), {}, {"MTL0": 20, "CPU": 12}),
        ((gpu(40, "MTL0"),), {}, {"MTL0": 32}),
        ((SHARED, gpu(8)), {"devices": ("Vulkan0", "CUDA0", "CPU")}, {"Vulkan0": 16, "CUDA0": 8, "CPU": 16}),
    ],
)
def test_planned_is_what_is_lent(
    gpus: tuple[Device, ...], options: dict[str, Any], lent: dict[str, int]
) -> None:
    """What a GPU shares with main memory counts once, and is the GPU's."""
    worker = hardware(gpus, **options)
    published = member(worker)
    found = rooms([published]).lent

    specs = [told(worker, name) for name in lent]
    assert [(spec.device, spec.quota_bytes) for spec in specs] == [(n, s * GB) for n, s in lent.items()]
    assert len({spec.socket for spec in specs}) == len(specs)
    assert told(worker) == specs[0]
    assert {each.name: each.bytes for each in lent_devices(published.facts)} == {
        name: size * GB for name, size in lent.items()
    }
    assert found[Place(published.id)].total_bytes == specs[0].quota_bytes
    if len(lent) > 1:
        named = {place.device: room.total_bytes for place, room in found.items() if place.device}
        assert named == {name: size * GB for name, size in lent.items()}


def test_a_device_that_is_not_lent_is_refused() -> None:
    with pytest.raises(LinkRefused):
        told(hardware(TWO, devices=("CUDA1",)), "CUDA0")


def test_a_node_that_names_no_devices_lends_its_first() -> None:
    """One of an older version, or that has only one."""
    old = member(hardware(TWO), devices=())

    assert [(each.name, each.bytes) for each in lent_devices(old.facts)] == [("CUDA0", 8 * GB)]
    assert planned(
        node("a", 12), replace(old, facts=replace(old.facts, hosting=HostingMode.NEVER))
    ).reason == ("need 21.6 GB for the model, have 20.0 GB on 2 nodes")


@pytest.mark.parametrize("gpus", [TWO, (gpu(8),)])
def test_a_worker_gets_no_layer_beyond_the_devices_that_it_may_lend(gpus: tuple[Device, ...]) -> None:
    """Of one or two GPUs of 8 GB and much main memory, 8 GB; a host has all of it."""
    worker = hardware(gpus, devices=("CUDA0",))
    host = rooms([member(hardware(gpus))]).hosting[NodeId("b")]
    short = planned(node("a", 12), member(worker, hosting=HostingMode.NEVER))
    held = planned(node("a", 15), member(worker, hosting=HostingMode.NEVER))

    assert host.total_bytes == sum(gpu.free_bytes for gpu in gpus) + MAIN
    assert short.reason == "need 21.6 GB for the model, have 20.0 GB on 2 nodes"
    assert held.host == "a"
    assert 7 * GB < held.stages[1].need_bytes <= told(worker).quota_bytes


def test_memory_that_a_gpu_shares_counts_once_for_a_host() -> None:
    unified = hardware((gpu(24, "MTL0"),))

    assert usable_bytes(unified) == rooms([member(unified)]).hosting[NodeId("b")].total_bytes == MAIN


def test_a_worker_takes_no_more_layers_than_its_gpu_may_have() -> None:
    options: dict[str, Any] = {"gpu_layers": 3}
    worker = member(hardware((gpu(24),), devices=("CUDA0",), **options), hosting=HostingMode.NEVER)
    with_memory = member(hardware((gpu(24),), **options), hosting=HostingMode.NEVER)

    assert counts(planned(node("a", 21), worker, split=True))["b"] == 3
    forced = planned(node("a", 30), worker, tensor_split=(1.0, 1.0))
    assert forced.mode is Mode.WAITING
    assert forced.reason == "layers 20-39 are for b, which lends its GPU for 3 (--gpu-layers)"
    rest = planned(node("a", 30), with_memory, tensor_split=(1.0, 1.0))
    assert devices(rest) == [("a", "", 20), ("b", "CUDA0", 3), ("b", "CPU", 17)]


def test_a_gpu_too_small_for_a_layer_is_named() -> None:
    worker = member(hardware((gpu(0.3),), devices=("CUDA0",)), hosting=HostingMode.NEVER)
    two = member(
        hardware((gpu(0.3), gpu(0.2, "CUDA1")), devices=("CUDA1", "CUDA0")), hosting=HostingMode.NEVER
    )

    assert reasons(planned(node("a", 40), worker)) == {
        "b": "not enough memory: 300 MB free on CUDA0, the device that it lends; a layer needs 741 MB"
    }
    assert reasons(planned(node("a", 40), two)) == {
        "b": "not enough memory: 300 MB free on CUDA0, the largest that it lends; a layer needs 741 MB"
    }


def test_a_node_that_came_later_to_a_shared_gpu_lends_what_it_saw() -> None:
    """The first one's model was there already, and it counts that itself."""
    first = node("a", 30, machine="m", machine_memory_bytes=30 * GB, gpus=(gpu(24),))
    later = node("b", 10, machine="m", machine_memory_bytes=10 * GB, gpus=(gpu(5),))

    found = rooms([first, later])

    assert found.lent[Place(later.id)].total_bytes == lent_devices(later.facts)[0].bytes == 5 * GB
    assert found.lent[Place(first.id)].total_bytes == 24 * GB


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        ((), {"max_memory_bytes": GB}, ""),
        (TWO, {"gpu_layers": 0}, ""),
        ((gpu(6),), {"devices": ("CUDA0",)}, "CUDA0 (6.0 GB)"),
        ((gpu(24),), {"max_memory_bytes": 8 * GB}, "CUDA0 (8.0 GB)"),
        (TWO, {}, "CUDA0 (8.0 GB), CUDA1 (8.0 GB) and main memory (32.0 GB)"),
        ((gpu(40),), {"gpu_layers": 5}, "CUDA0 (40.0 GB, at most 5 layers) and main memory (32.0 GB)"),
    ],
)
def test_what_is_lent_is_told(gpus: tuple[Device, ...], options: dict[str, Any], words: str) -> None:
    assert lent_text(hardware(gpus, **options).devices) == (words and f"As a worker this node lends {words}")


def test_of_equal_gpus_one_is_measured() -> None:
    other = replace(gpu(8, "CUDA2"), description="another")
    found = hardware((*TWO, other))

    assert measured_as(found) == {"CUDA0": "CUDA0", "CUDA1": "CUDA0", "CUDA2": "CUDA2", "CPU": "CPU"}
    assert measured_as(hardware((other,), devices=("CUDA2",))) == {"CUDA2": "CUDA2"}
    assert measured_as(hardware(())) == {"CPU": "CPU"}


def test_a_device_named_twice_is_there_once() -> None:
    assert hardware(TWO, devices=("CUDA1", "CUDA1")).gpus == TWO[1:]


# -- --max-memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [(), TWO, (gpu(24),), (gpu(3),)])
def test_a_bound_holds_for_gpus_and_main_memory_together(gpus: tuple[Device, ...]) -> None:
    size = 8 * GB
    bounded = hardware(gpus, max_memory_bytes=8 * GB)
    host = member(bounded)
    small, large = model(10), model(20)

    assert usable_bytes(bounded) == size
    assert rooms([host]).hosting[host.id].total_bytes == size
    held = decide(Snapshot(nodes=(host,)), small, settings(), current=None)
    assert (held.mode, held.have_bytes) == (Mode.SOLO, size)
    assert 6 * GB < held.need_bytes <= size
    waiting = decide(Snapshot(nodes=(host,)), large, settings(), current=None)
    assert waiting.mode is Mode.WAITING
    assert waiting.reason == "need 11.3 GB for the model, have 8.0 GB on 1 node"


def test_what_a_projector_takes_is_within_the_bound() -> None:
    bounded = hardware((gpu(24),), max_memory_bytes=8 * GB).without(GB)

    assert usable_bytes(bounded) == bounded.devices[0].bytes == 7 * GB
    assert usable_bytes(hardware(()).without(GB)) == MAIN - GB
