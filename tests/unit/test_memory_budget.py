"""What a worker child is given is what plans count on, whatever a person asked of the node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine import machine
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.host.launch import Launch
from mesh_llm.local.hardware import Hardware, chosen, equipped
from mesh_llm.planning.decide import decide
from mesh_llm.planning.memory_budget import loan, unlent, usable_bytes
from mesh_llm.planning.memory_layout import rooms
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Device, DeviceKind, HostingMode, Mode, NodeId, Plan
from tests.support.planning import GB, counts, gpu, mesh, model, node, reasons, settings

MAIN = 32 * GB
TWO = (gpu(8), gpu(8, "CUDA1"))
CPU = replace(gpu(64, "CPU"), kind=DeviceKind.CPU)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: MAIN)


def hardware(gpus: tuple[Device, ...], **options: Any) -> Hardware:
    config = NodeConfig(home=Path("/home"), **options)
    return equipped(config, {}, None, chosen(config, (CPU, *gpus)), None)


def told(worker: Hardware) -> WorkerSpec:
    """What the worker child hears."""
    launch = Launch(
        me=NodeId("b"),
        config=NodeConfig(home=Path("/home")),
        hardware=worker,
        model=model(),
        settings=settings(),
    )
    return launch.worker(Path("socket"), nodes_here=1)


def member(worker: Hardware, **changes: Any) -> Candidate:
    """The same node, as others see it."""
    published = {**worker.facts(), "engine": node("b").facts.engine, "machine": "b", "speed": None}
    return node("b", **{**published, **changes})


def planned(*nodes: Candidate, **changes: Any) -> Plan:
    return decide(mesh(*nodes), model(), settings(**changes), current=None)


@pytest.mark.parametrize(
    ("gpus", "options", "device", "size"),
    [
        ((), {}, "CPU", MAIN),
        (TWO, {}, "CUDA0", 8 * GB),
        (TWO, {"devices": ("CUDA1", "CUDA0")}, "CUDA1", 8 * GB),
        (TWO, {"devices": ("none",)}, "CPU", MAIN),
        (TWO, {"devices": ("CPU",)}, "CPU", MAIN),
        (TWO, {"gpu_layers": 0}, "CPU", MAIN),
        (TWO, {"gpu_layers": 3}, "CUDA0", 8 * GB),
        ((gpu(6),), {}, "CUDA0", 6 * GB),
        ((gpu(24),), {"max_memory_bytes": 8 * GB}, "CUDA0", 8 * GB),
        ((gpu(24),), {"max_memory_bytes": 8 * GB, "gpu_layers": 0}, "CPU", 8 * GB),
        ((gpu(24),), {"max_memory_bytes": 90 * GB}, "CUDA0", 24 * GB),
        ((), {"max_memory_bytes": 1}, "CPU", 1),
    ],
)
def test_planned_is_what_is_lent(
    gpus: tuple[Device, ...], options: dict[str, Any], device: str, size: int
) -> None:
    worker = hardware(gpus, **options)

    spec = told(worker)
    assert (spec.device, spec.quota_bytes) == (device, size)
    published = member(worker)
    assert loan(published.facts) == loan(worker)
    assert rooms([published]).lent[published.id].total_bytes == size


@pytest.mark.parametrize("gpus", [TWO, (gpu(8),)])
def test_a_worker_gets_no_layer_beyond_its_device(gpus: tuple[Device, ...]) -> None:
    """Two GPUs of 8 GB, or one and much main memory, lend 8 GB; a host has all of it."""
    worker = hardware(gpus)
    host = rooms([member(worker)]).hosting[NodeId("b")]
    short = planned(node("a", 12), member(worker, hosting=HostingMode.NEVER))
    held = planned(node("a", 15), member(worker, hosting=HostingMode.NEVER))

    assert host.total_bytes == sum(gpu.free_bytes for gpu in gpus) + MAIN
    assert short.reason == "need 21.6 GB for the model, have 20.0 GB on 2 nodes"
    assert held.host == "a"
    assert 7 * GB < held.stages[1].need_bytes <= told(worker).quota_bytes


def test_a_worker_takes_no_more_layers_than_its_gpu_may_have() -> None:
    worker = member(hardware((gpu(24),), gpu_layers=3), hosting=HostingMode.NEVER)

    assert counts(planned(node("a", 21), worker, split=True))["b"] == 3
    forced = planned(node("a", 30), worker, tensor_split=(1.0, 1.0))
    assert forced.mode is Mode.WAITING
    assert forced.reason == "layers 20-39 are for b, which lends its GPU for 3 (--gpu-layers)"


def test_a_gpu_too_small_for_a_layer_is_named() -> None:
    worker = member(hardware((gpu(0.3),)), hosting=HostingMode.NEVER)

    assert reasons(planned(node("a", 40), worker)) == {
        "b": "not enough memory: 300 MB free on CUDA0, the device that it lends; a layer needs 741 MB"
    }


def test_a_node_that_came_later_to_a_shared_gpu_lends_what_it_saw() -> None:
    """The first one's model was there already, and it counts that itself."""
    first = node("a", 30, machine="m", machine_memory_bytes=30 * GB, gpus=(gpu(24),))
    later = node("b", 10, machine="m", machine_memory_bytes=10 * GB, gpus=(gpu(5),))

    found = rooms([first, later])

    assert found.lent[later.id].total_bytes == loan(later.facts).bytes == 5 * GB
    assert found.lent[first.id].total_bytes == 24 * GB


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        ((), {"max_memory_bytes": GB}, ""),
        (TWO, {"gpu_layers": 0}, ""),
        ((gpu(40),), {}, ""),
        ((gpu(24),), {"max_memory_bytes": 8 * GB}, ""),
        (
            (gpu(6),),
            {},
            "As a worker this node lends CUDA0 alone, 6.0 GB; "
            "main memory only when it hosts (--device chooses another)",
        ),
        (
            (gpu(40), gpu(8, "CUDA1")),
            {},
            "As a worker this node lends CUDA0 alone, 40.0 GB; "
            "CUDA1 only when it hosts (--device chooses another)",
        ),
        (
            TWO,
            {"gpu_layers": 5},
            "As a worker this node lends CUDA0 alone, 8.0 GB and at most 5 layers (--gpu-layers); "
            "CUDA1 and main memory only when it hosts (--device chooses another)",
        ),
        (
            (gpu(40),),
            {"gpu_layers": 5},
            "As a worker this node lends CUDA0 alone, 40.0 GB and at most 5 layers (--gpu-layers)",
        ),
    ],
)
def test_what_is_not_lent_is_named(gpus: tuple[Device, ...], options: dict[str, Any], words: str) -> None:
    assert unlent(hardware(gpus, **options)) == words


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

    assert usable_bytes(bounded) == loan(bounded).bytes == 7 * GB
    assert usable_bytes(hardware(()).without(GB)) == MAIN - GB
