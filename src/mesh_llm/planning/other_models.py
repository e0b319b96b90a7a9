"""What other models leave of each node's memory and speed. Pure.

Memory, devices and threads are one budget: the plans of other models are taken off before the next model
is planned. A model gives way to those before it, and never moves for one behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mesh_llm.planning.memory_budget import CPU, is_unified, lent_devices, used_gpus
from mesh_llm.planning.shared_machines import at_once, part_of
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import NodeFacts, NodeId, Plan, Speed


def without(snapshot: Snapshot, taken: Iterable[Plan], *, before: Iterable[Plan] = ()) -> Snapshot:
    """The mesh as it is for one more model: `taken` have memory, and `before` also compute."""
    taken, before = tuple(taken), tuple(before)
    if not taken and not before:
        return snapshot
    used = _used(snapshot, taken)
    machines: Counter[tuple[str, str]] = Counter()
    for node in snapshot.nodes:
        for device, size in used.get(node.id, {}).items():
            machines[_machine(node), device] += size
    nodes = {node.id: _machine(node) for node in snapshot.nodes}
    computing = Counter(
        machine for plan in before for machine in {nodes.get(node, "") for node in plan.nodes}
    )

    def left(node: Candidate) -> NodeFacts:
        here = sum(node.id in plan.nodes for plan in before)
        slowed = _slowed(node.facts, here, computing[_machine(node)] - here)
        return _left(node.facts, used.get(node.id, {}), _here(node, machines), slowed)

    return Snapshot(nodes=tuple(replace(node, facts=left(node)) for node in snapshot.nodes))


def _machine(node: Candidate) -> str:
    return node.facts.machine or f"of {node.id}"


def _here(node: Candidate, machines: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Taken on its machine, by device."""
    return {device: size for (machine, device), size in machines.items() if machine == _machine(node)}


def _used(snapshot: Snapshot, plans: Iterable[Plan]) -> dict[NodeId, Counter[str]]:
    """Bytes that plans take of each node, by device."""
    used: dict[NodeId, Counter[str]] = {node.id: Counter() for node in snapshot.nodes}
    for plan in plans:
        staged = sum(stage.need_bytes for stage in plan.stages)
        needs = [(stage.node, stage.device, stage.need_bytes, stage.main_bytes or 0) for stage in plan.stages]
        if plan.host is not None and plan.need_bytes > staged:
            # A host without layers has the embedding and the head.
            needs.append((plan.host, "", plan.need_bytes - staged, 0))
        for id, device, size, main in needs:
            if (node := snapshot.node(id)) is not None:
                main = min(main, size)
                used[id][CPU] += main
                _take(used[id], node.facts, device, size - main, hosts=id == plan.host)
    return used


def _take(used: Counter[str], facts: NodeFacts, device: str, size: int, *, hosts: bool) -> None:
    """Where no more is known: a worker's stage lies on its device, a host's on the GPUs as far as they go."""
    if hosts:
        for gpu in used_gpus(facts):
            part = max(0, min(size, gpu.free_bytes - used[gpu.name]))
            used[gpu.name] += part
            size -= part
        used[CPU] += size
    else:
        used[device or lent_devices(facts)[0].name] += size


def _left(facts: NodeFacts, own: Mapping[str, int], machine: Mapping[str, int], slowed: float) -> NodeFacts:
    if not machine and slowed == 1:
        return facts
    most = facts.max_memory_bytes
    whole = facts.machine_memory_bytes or facts.memory_bytes
    main = {CPU, *(gpu.name for gpu in facts.gpus if is_unified(gpu))}
    return replace(
        facts,
        memory_bytes=max(0, facts.memory_bytes - _sum(own, main)),
        machine_memory_bytes=max(1, whole - _sum(machine, main)),
        max_memory_bytes=None if most is None else max(0, most - sum(own.values())),
        gpus=tuple(
            replace(gpu, free_bytes=max(0, gpu.free_bytes - machine.get(gpu.name, 0))) for gpu in facts.gpus
        ),
        devices=tuple(
            replace(
                device,
                bytes=max(0, device.bytes - own.get(device.name, 0)),
                experts_bytes=max(0, device.experts_bytes - own.get(CPU, 0)),
                speed=_part_of(device.speed, 1 / slowed),
            )
            for device in facts.devices
        ),
        speed=_part_of(facts.speed, 1 / slowed),
    )


def _sum(used: Mapping[str, int], devices: Iterable[str]) -> int:
    return sum(used.get(device, 0) for device in devices)


def _slowed(facts: NodeFacts, here: int, beside: int) -> float:
    """By so many models that compute on a node, and as many on others of its machine."""
    if used_gpus(facts):
        return 1 + here + beside
    if facts.cores:
        return 1 + here  # its part of the threads is its own
    return (1 + here) * max(1.0, (1 + beside) / at_once(facts.threads, facts.machine_threads))


def _part_of(speed: Speed | None, share: float) -> Speed | None:
    return part_of(speed, share) if speed is not None else None
