"""A mixture's experts in main memory beside a GPU: what options say, plans count and children are told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig, parse_override
from mesh_llm.engine import machine
from mesh_llm.engine.spec import EngineSpec, LinkSpec, WorkerSpec
from mesh_llm.errors import UsageError
from mesh_llm.host.launch import Launch
from mesh_llm.host.worker_launch import worker_spec
from mesh_llm.local.hardware import Hardware, chosen, equipped, measured_as
from mesh_llm.planning.decide import decide
from mesh_llm.planning.layer_costs import load_of
from mesh_llm.planning.memory_budget import lent_text
from mesh_llm.planning.memory_layout import Free, furthest, lodge
from mesh_llm.planning.speculation import cache_settings
from mesh_llm.types import HostingMode, Mode, NodeId, Place, Plan
from tests.support.planning import GB, gpu, mesh, model, node, plan_of, settings

MAIN = 32 * GB
ALL = 10_000
MIXTURE = replace(
    model(),
    layers=tuple(replace(layer, expert_bytes=layer.weight_bytes * 9 // 10) for layer in model().layers),
)
"""20 GB, 18 of them experts."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: MAIN)


def launch(*sizes: float, me: str = "b", **options: Any) -> Launch:
    gpus = tuple(gpu(size, f"CUDA{index}") for index, size in enumerate(sizes))
    config = NodeConfig(home=Path("/home"), threads=1, **options)
    has = equipped(config, {}, None, chosen(config, gpus), None)
    return Launch(me=NodeId(me), config=config, hardware=has, model=MIXTURE, settings=settings())


def worker_of(has: Hardware) -> Any:
    published = {**has.facts(), "engine": node("b").facts.engine, "machine": "b", "speed": None}
    return node("b", **published, hosting=HostingMode.NEVER)


def planned(has: Hardware, host_gb: float) -> Plan:
    return decide(mesh(node("a", host_gb), worker_of(has)), MIXTURE, settings(), current=None)


def told(node: Launch) -> WorkerSpec:
    return worker_spec(node.config, node.hardware, Path("socket"), nodes_here=1)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exps", "--override-tensor exps is not PATTERN=CPU"),
        ("=CPU", "--override-tensor =CPU is not PATTERN=CPU"),
        (
            "a=CPU,exps=CUDA1",
            "--override-tensor exps=CUDA1: weights can be kept in CPU, which is main memory, not in CUDA1",
        ),
        (
            "a(=CPU",
            "--override-tensor a(=CPU: the pattern is wrong: "
            "missing ), unterminated subpattern at position 1",
        ),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        list(parse_override(text))
    assert caught.value.message == message


def test_patterns() -> None:
    assert list(parse_override(r"\.ffn_up_exps=CPU,attn=CPU")) == [r"\.ffn_up_exps", "attn"]
    with pytest.raises(UsageError, match="--n-cpu-moe and --override-tensor cannot be used together"):
        NodeConfig(home=Path("/home"), n_cpu_moe=3, override_tensor=("a",))
    with pytest.raises(UsageError, match="--n-cpu-moe -1 is not between 0 and 10,000"):
        NodeConfig(home=Path("/home"), n_cpu_moe=-1)


# -- what is lent and planned ----------------------------------------------------------------------


def test_main_memory_is_for_the_experts_of_its_gpus() -> None:
    one, two = launch(8, cpu_moe=True), launch(8, 8, cpu_moe=True, max_memory_bytes=20 * GB)

    assert [(each.name, each.bytes, each.experts_bytes) for each in one.hardware.devices] == [
        ("CUDA0", 8 * GB, MAIN)
    ]
    assert [each.experts_bytes for each in two.hardware.devices] == [2 * GB, 2 * GB]
    assert one.hardware.facts()["devices"] == one.hardware.devices
    assert lent_text(one.hardware.devices) == (
        "As a worker this node lends CUDA0 (8.0 GB, experts in main memory: 32.0 GB)"
    )
    # Its experts are as fast as its CPU.
    assert measured_as(one.hardware) == {"CUDA0": "CUDA0", "CPU": "CPU"}


def test_without_a_gpu_they_lie_there_anyway() -> None:
    none = launch(cpu_moe=True)
    assert none.hardware.cpu_moe == 0
    assert told(none).main_memory is None


def test_a_plan_counts_experts_in_main_memory() -> None:
    """20 GB beside a host of 4 GB: an 8 GB GPU is too small for them, unless its experts lie elsewhere."""
    plain = planned(launch(8, devices=("CUDA0",)).hardware, 4)
    kept = planned(launch(8, devices=("CUDA0",), cpu_moe=True).hardware, 4)
    some = planned(launch(8, devices=("CUDA0",), n_cpu_moe=34).hardware, 4)
    few = planned(launch(8, devices=("CUDA0",), n_cpu_moe=20).hardware, 4)

    assert plain.mode is few.mode is Mode.WAITING
    assert kept.mode is some.mode is Mode.SPLIT
    assert kept.stages[-1].last - kept.stages[-1].first > 30
    assert kept.stages[-1].place == Place(NodeId("b"))
    little = planned(launch(8, devices=("CUDA0",), cpu_moe=True, max_memory_bytes=12 * GB).hardware, 4)
    assert little.mode is Mode.WAITING


@pytest.mark.parametrize("cpu_moe", [0, 1, 5, 12, ALL])
@pytest.mark.parametrize("gpu_only", [True, False])
def test_layers_lie_where_there_is_room(cpu_moe: int, gpu_only: bool) -> None:
    """As by trying all."""
    load = load_of(MIXTURE, cache_settings(MIXTURE, settings(), 4096))
    for main, on_gpu, bound in ((0, 8, ALL), (4, 3, ALL), (8, 6, 7), (30, 2, ALL), (30, 30, 12)):
        free = Free(main * GB, on_gpu * GB, bound, cpu_moe=cpu_moe, gpu_only=gpu_only)
        scratch = load.scratch_bytes(host=False, head=False)

        def fits(start: int, last: int, first: int = 3, free: Free = free, scratch: int = scratch) -> bool:
            layers = MIXTURE.layers[start : min(last, start + free.cpu_moe)]
            experts = sum(layer.expert_bytes for layer in layers)
            device = load.sums[last] - load.sums[start] - experts + scratch
            rest = load.sums[start] - load.sums[first] + scratch if start > first else 0
            whole = start == first or (not free.gpu_only and start < last)
            counted = last - start <= free.gpu_layers
            return device <= free.gpu_bytes and rest + experts <= free.main_bytes and whole and counted

        ends = [last for last in range(4, 41) if any(fits(start, last) for start in range(3, last))]
        found = furthest(free, load, 3, host=False, head=False)
        place = lodge(free, load, 3, max(ends, default=3), host=False, head=False)
        assert place is None or place.main_bytes <= free.main_bytes
        if gpu_only:
            assert (found or 3) == max(ends, default=3)


# -- what children are told ------------------------------------------------------------------------


def test_a_worker_child_keeps_them_in_main_memory() -> None:
    some = told(launch(8, n_cpu_moe=20))
    assert some.main_memory is not None
    assert (some.main_memory.layers, some.main_memory.quota_bytes) == (20, MAIN)
    assert WorkerSpec.from_line(some.to_line().decode()) == some
    assert told(launch(8)).main_memory is None
    own = launch(8, override_tensor=("attn_q", "ffn"))
    assert [device.name for device in own.hardware.devices] == ["CUDA0"]
    assert (kept := told(own).main_memory) is not None
    assert (kept.pattern, kept.layers, kept.quota_bytes) == ("(?:attn_q)|(?:ffn)", None, MAIN)


def hosted(node_: Launch, first_layers: int) -> EngineSpec:
    """With so many layers here, the others on a worker; all: alone."""
    stages = (node_.me, 0, first_layers), (NodeId("z"), first_layers, 40)
    plan = replace(plan_of(*[each for each in stages if each[1] < each[2]]), context=4096, slots=1)
    links = tuple(LinkSpec(name="MESH0", fd=0, layers=stage.last - stage.first) for stage in plan.workers)
    return node_.engine(plan, links, nodes_here=1)


def matches(spec: EngineSpec, layer: int, name: str = "ffn_up_exps.weight") -> bool:
    return any(re.search(pattern, f"blk.{layer}.{name}") for pattern in spec.overrides)


def test_a_host_keeps_those_of_its_own_layers() -> None:
    alone = hosted(launch(8, cpu_moe=True), 40)
    split = hosted(launch(8, cpu_moe=True), 12)
    some = hosted(launch(24, n_cpu_moe=3), 40)

    assert alone.gpu_layers == 41
    assert [layer for layer in range(40) if matches(alone, layer)] == list(range(40))
    assert not matches(alone, 1, "ffn_up.weight")
    assert [layer for layer in range(40) if matches(split, layer)] == list(range(12))
    assert [layer for layer in range(40) if matches(some, layer)] == [0, 1, 2]
    assert "=" not in "".join((*alone.overrides, *split.overrides, *some.overrides))
    assert hosted(launch(8), 40).overrides == hosted(launch(cpu_moe=True), 40).overrides == ()
    # 8 GB hold a part of it.
    assert hosted(launch(8), 40).gpu_layers < 20
    assert EngineSpec.from_line(alone.to_line().decode()) == alone
    own = hosted(launch(24, override_tensor=(r"^blk\.3\.attn_q",)), 40)
    assert [layer for layer in range(40) if matches(own, layer, "attn_q.weight")] == [3]
