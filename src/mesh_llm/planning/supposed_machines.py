"""Machines that are not there, as members of a mesh: what could be planned if they were. Pure.

Nobody has measured them. Their speeds are those of usual machines of their kind, so a prediction says less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.frozen import frozen
from mesh_llm.planning.memory_budget import CPU, loans
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import (
    Device,
    DeviceKind,
    LinkFacts,
    LinkKind,
    NodeFacts,
    NodeId,
    Plan,
    Role,
    Speed,
)

ASSUMED_WITHIN = 0.75
"""How far a prediction for such machines may be off, as a share of it."""
BESIDE_GPU_BYTES = 4_000_000_000
"""Main memory of a machine of which only its GPU's is told: embeddings lie there."""

_DEVICES = {"cuda": "CUDA0", "rocm": "ROCm0", "vulkan": "Vulkan0", "metal": "MTL0"}
_SPEEDS = {
    "cpu": Speed(read_bytes_per_s=40e9, flops_per_s=0.4e12, attention_per_s=0.2e12),
    "metal": Speed(read_bytes_per_s=120e9, flops_per_s=5e12, attention_per_s=2e12),
    "vulkan": Speed(read_bytes_per_s=250e9, flops_per_s=10e12, attention_per_s=4e12),
    "rocm": Speed(read_bytes_per_s=400e9, flops_per_s=20e12, attention_per_s=8e12),
    "cuda": Speed(read_bytes_per_s=600e9, flops_per_s=40e12, attention_per_s=16e12),
}
"""Of two channels of DDR5, of a plain M-series chip, of cards of the middle class."""
KINDS = tuple(_SPEEDS)


@frozen
class SupposedMachine:
    name: str
    bytes: int
    """That it lends: of its GPU where it has one, else of main memory."""
    kind: str = "cpu"
    main_bytes: int = 0
    """Main memory beside the GPU's."""
    read_bytes_per_s: float | None = None
    """None: as is usual for its kind."""

    @property
    def speed(self) -> Speed:
        usual, told = _SPEEDS[self.kind], self.read_bytes_per_s
        return usual if told is None else replace(usual, read_bytes_per_s=told)

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.speed.read_bytes_per_s / 1e9:.0f} GB/s"


def joined(
    machines: Sequence[SupposedMachine], others: Sequence[Candidate], *, rtt_s: float
) -> tuple[Candidate, ...]:
    """All of them in one mesh, with `others`, which are there; a new link takes `rtt_s`."""
    ids = [NodeId(f"{index:064x}") for index in range(1, len(machines) + 1)]
    known = [node.id for node in others]
    link = LinkFacts(kind=LinkKind.QUIC, rtt_s=rtt_s)
    made = [
        Candidate(
            id=id,
            facts=replace(
                _facts(machine), links=tuple((other, link) for other in (*ids, *known) if other != id)
            ),
        )
        for id, machine in zip(ids, machines, strict=True)
    ]
    return (*made, *others)


def less_certain(plan: Plan) -> Plan:
    """The same plan, with what such machines leave of its prediction."""
    if plan.predicted is None:
        return plan
    wide = replace(plan.predicted, tok_s_within=ASSUMED_WITHIN, first_token_within=ASSUMED_WITHIN)
    return replace(plan, predicted=wide)


def _facts(machine: SupposedMachine) -> NodeFacts:
    facts = NodeFacts(
        name=machine.name,
        role=Role.NODE,
        version="",
        engine=ENGINE_VERSION,
        memory_bytes=machine.bytes,
        machine_memory_bytes=machine.bytes,
        speed=machine.speed,
    )
    if machine.kind == "cpu":
        return facts
    gpu = Device(
        name=_DEVICES[machine.kind],
        description=machine.kind,
        kind=DeviceKind.GPU,
        free_bytes=machine.bytes,
        total_bytes=machine.bytes,
    )
    # Metal's memory is the machine's.
    main = machine.bytes if machine.kind == "metal" else machine.main_bytes or BESIDE_GPU_BYTES
    facts = replace(facts, gpus=(gpu,), memory_bytes=main, machine_memory_bytes=main)
    if not machine.main_bytes:
        return facts
    speeds = {gpu.name: machine.speed, CPU: _SPEEDS["cpu"]}
    return replace(facts, devices=loans(facts, with_memory=True, speeds=speeds))
