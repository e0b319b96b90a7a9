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
"""Of a usual machine of its kind. Reading follows data sheets (bus width times transfers), of which kernels
reach about four fifths:

cpu     two channels of DDR4-3200 have 51 GB/s, of DDR5-5600 90
metal   a plain M4 has 120 (128 bits of LPDDR5X-7500), and comes close to them
vulkan  a Radeon RX 7600 has 288, an Arc B580 456
rocm    a Radeon RX 6800 has 512, a 7800 XT 624
cuda    a GeForce RTX 4070 has 504, a 4070 Ti Super 672, a 3090 936

Of products a third to a half of what data sheets promise (8 cores with AVX2: 1 TFLOPS; RX 7600: 21;
7800 XT: 37; RTX 4070: 116 in half precision), as weights are unpacked first; of attention half of that.
These two shares are guesses.
"""
_READ_GB_PER_S = {
    "cpu": (20, 400),
    "metal": (65, 800),
    "vulkan": (50, 750),
    "rocm": (180, 4200),
    "cuda": (150, 6400),
}
"""A small one and a large one of that kind, likewise: one channel, and a server's twelve; an M1 (68), and an
M3 Ultra (819); a GPU within a processor, and an RX 7900 XTX (960); an RX 6600 (224), and an MI300X (5,300);
a GTX 1650 (192), and a B200 (8,000)."""
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
        text = f"{self.name}: {self.kind}, {self.speed.read_bytes_per_s / 1e9:.0f} GB/s"
        if self.read_bytes_per_s is not None:
            return text
        least, most = _READ_GB_PER_S[self.kind]
        return f"{text} (others of the kind: {least} to {most:,})"


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
