"""Models, nodes and meshes for tests of planning: small to write down, whole to plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from mesh_llm.lab.simulate import planning_cases
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.memory_budget import CPU, loans
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import (
    Device,
    DeviceKind,
    Fingerprint,
    HeldModel,
    HostingMode,
    Layer,
    LayerCache,
    LinkFacts,
    LinkKind,
    Mode,
    ModelFacts,
    NodeFacts,
    NodeId,
    Plan,
    Role,
    ServingPlan,
    Speed,
    Stage,
)

GB = 10**9
FINGERPRINT = Fingerprint("f" * 64)
ENGINE = "2026.10.11549"
HELD = HeldModel(fingerprint=FINGERPRINT, name="big", size_bytes=20 * GB)


def model(layers: int = 40, layer_bytes: int | Sequence[int] = GB // 2, **changes: Any) -> ModelFacts:
    """20 GB in 40 layers, unless told otherwise: the measures of a dense 32B model."""
    sizes = [layer_bytes] * layers if isinstance(layer_bytes, int) else list(layer_bytes)
    facts = replace(
        planning_cases.model_of(layers, 20),
        files=(Path("big.gguf"),),
        fingerprint=FINGERPRINT,
        name="Big",
        layers=tuple(
            Layer(weight_bytes=size, cache=LayerCache(k_width=1024, v_width=1024)) for size in sizes
        ),
    )
    return replace(facts, **changes)


def settings(**changes: Any) -> MeshSettings:
    """One slot of 4096 tokens, nothing guessed ahead."""
    plain = MeshSettings(
        version=1, model="big", fingerprint=FINGERPRINT, alias="big", context=4096, slots=1, guess=False
    )
    return replace(plain, **changes)


def speed(gb_s: float) -> Speed:
    return Speed(read_bytes_per_s=gb_s * GB, flops_per_s=20 * gb_s * GB, attention_per_s=10 * gb_s * GB)


def gpu(gb: float, name: str = "CUDA0") -> Device:
    size = int(gb * GB)
    return Device(name=name, description="", kind=DeviceKind.GPU, free_bytes=size, total_bytes=size)


def node(
    name: str,
    gb: float = 12,
    *,
    gb_s: float | None = 40,
    links: Mapping[str, float] | None = None,
    alive: bool = True,
    reachable: bool = True,
    **changes: Any,
) -> Candidate:
    """A machine of its own; its id is its name. `links` are round trips in milliseconds by name."""
    facts = NodeFacts(
        name=name,
        role=Role.NODE,
        version="0.2.0",
        engine=ENGINE,
        machine=f"machine of {name}",
        memory_bytes=int(gb * GB),
        machine_memory_bytes=int(gb * GB),
        speed=speed(gb_s) if gb_s else None,
        models=(HELD,),
        links=tuple((NodeId(to), link(rtt_ms)) for to, rtt_ms in (links or {}).items()),
    )
    return Candidate(id=NodeId(name), facts=replace(facts, **changes), alive=alive, reachable=reachable)


def lending(node: Candidate, **gb_s: float | None) -> Candidate:
    """The same, which lends all its devices; `gb_s` by name, where that is not the node's own speed."""
    own, found = node.facts.speed, {name: speed(each) if each else None for name, each in gb_s.items()}
    speeds = {name: found.get(name, own) for name in (CPU, *(gpu.name for gpu in node.facts.gpus))}
    devices = loans(node.facts, with_memory=True, speeds=speeds)
    return replace(node, facts=replace(node.facts, devices=devices if len(devices) > 1 else ()))


def link(rtt_ms: float, kind: LinkKind = LinkKind.QUIC) -> LinkFacts:
    return LinkFacts(kind=kind, rtt_s=rtt_ms / 1e3)


def mesh(*nodes: Candidate, rtt_ms: float | None = 0.4) -> Snapshot:
    """A snapshot; where a node says nothing of another, `rtt_ms` lie between them."""
    return Snapshot(nodes=tuple(_linked(each, nodes, rtt_ms) for each in nodes))


def _linked(one: Candidate, nodes: Sequence[Candidate], rtt_ms: float | None) -> Candidate:
    known = {id for id, _ in one.facts.links}
    known |= {other.id for other in nodes if one.id in dict(other.facts.links)}
    others = [] if rtt_ms is None else [each for each in nodes if each.id not in {one.id, *known}]
    links = one.facts.links + tuple((other.id, link(rtt_ms or 0)) for other in others)
    return replace(one, facts=replace(one.facts, links=links))


def plan_of(*stages: tuple[NodeId, int, int], **changes: Any) -> Plan:
    """A split over those who have these layers, the first of whom hosts it, unless told otherwise."""
    plan = Plan(
        mode=Mode.SPLIT,
        host=stages[0][0] if stages else None,
        stages=tuple(
            Stage(node=node, first=first, last=last, weight_bytes=0, need_bytes=0, share=0.5)
            for node, first, last in stages
        ),
        context=4096,
        slots=1,
        head_on_worker=False,
        need_bytes=0,
        have_bytes=0,
        predicted=None,
        excluded=(),
        reason="",
    )
    return replace(plan, **changes)


def running(plan: Plan) -> ServingPlan:
    return ServingPlan(epoch=1, plan=plan)


def devices(plan: Plan) -> list[tuple[str, str, int]]:
    """Node, device and number of layers of each stage."""
    return [(stage.node, stage.device, stage.last - stage.first) for stage in plan.stages]


def layers(plan: Plan) -> dict[str, tuple[int, int]]:
    return {stage.node: (stage.first, stage.last) for stage in plan.stages}


def counts(plan: Plan) -> dict[str, int]:
    return {stage.node: stage.last - stage.first for stage in plan.stages}


def reasons(plan: Plan) -> dict[str, str]:
    return {each.node: each.reason for each in plan.excluded}


def any_model(random: Random) -> ModelFacts:
    """Some model: dense or a mixture, with equal layers or not, its head tied or not."""
    count = random.choice([1, 2, 12, 30, 40, 80])
    size = random.choice([20_000_000, 200_000_000, GB])
    sizes = [size if random.random() < 0.7 else int(size * random.uniform(0.4, 1.6)) for _ in range(count)]
    if random.random() < 0.5:
        sizes = [size] * count
    mixture: dict[str, Any] = {}
    if random.random() < 0.3:
        mixture = {"experts": 64, "experts_used": 8, "expert_feed_forward": 1024}
    return model(
        layer_bytes=sizes,
        head_bytes=random.choice([0, 400_000_000]),
        context_trained=random.choice([300, 2048, 8192, 131_072]),
        **mixture,
    )


def any_mesh(random: Random, count: int) -> Snapshot:
    """Some mesh of so many nodes, with nearly everything that can be in one."""
    names = [f"{random.getrandbits(32):08x}" for _ in range(count)]
    return Snapshot(nodes=tuple(_any_node(random, name, names) for name in names))


def _any_node(random: Random, name: str, names: Sequence[str]) -> Candidate:
    memory = random.choice([0.2, 1, 4, 8, 16, 64])
    shared = random.random() < 0.3
    gpus = (
        tuple(gpu(random.choice([4, 8, 24]), f"CUDA{each}") for each in range(2))
        if random.random() < 0.3
        else ()
    )
    links = {
        other: random.choice([0.2, 0.5, 3, 20, 180])
        for other in names
        if other != name and random.random() < 0.7
    }
    found = node(
        name,
        memory,
        gb_s=None if random.random() < 0.05 else random.choice([10, 40, 100, 900]),
        links=links,
        alive=random.random() < 0.9,
        reachable=random.random() < 0.95,
        machine=random.choice(["one", "two"]) if shared else name,
        machine_memory_bytes=int(random.choice([4, 16]) * GB) if shared else int(memory * GB),
        gpus=gpus,
        gpu_layers=random.choice([None, None, 0, 3]) if gpus else None,
        max_memory_bytes=int(random.choice([2, 6]) * GB) if random.random() < 0.1 else None,
        role=Role.CLIENT if random.random() < 0.1 else Role.NODE,
        engine=random.choice([ENGINE] * 8 + ["2026.9.1", ""]),
        splits=random.random() < 0.95,
        hosting=random.choice([HostingMode.AUTO] * 4 + [HostingMode.PREFER, HostingMode.NEVER]),
        models=(HELD,) if random.random() < 0.9 else (),
    )
    return lending(found, CPU=random.choice([5, 30, None])) if random.random() < 0.7 else found


def any_settings(random: Random, count: int) -> MeshSettings:
    ratios = tuple(random.choice([0.0, 1.0, 2.0, 0.5]) for _ in range(random.randint(1, count)))
    return settings(
        context=random.choice([None, None, 512, 4096]),
        slots=random.choice([1, 4]),
        cache_type_k=random.choice(["f16", "q8_0"]),
        split=random.random() < 0.3,
        tensor_split=ratios if random.random() < 0.15 else None,
    )
