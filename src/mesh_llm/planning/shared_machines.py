"""What is left of a machine's speed where several nodes compute on it. Pure.

The children of each node get as many threads as those of the others, and the speed of a
machine is measured with all of them: a part of the threads is taken to do that part of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import NodeId, Role, Speed


def threads_of(cores: int, nodes_here: int) -> int:
    """For each of so many nodes on a machine."""
    return max(1, cores // nodes_here)


def shared(speed: Speed, cores: int, nodes_here: int) -> Speed:
    """What each of them can do; where they share no `cores`, all that was measured."""
    if cores <= 0:
        return speed
    # Memory that is read by fewer threads may be as fast on a large machine; on a small one it is not,
    # and too little is the better mistake: nobody waits longer than was said.
    return part_of(speed, threads_of(cores, nodes_here) / cores)


def part_of(speed: Speed, share: float) -> Speed:
    """Of whatever is measured."""
    return Speed(
        read_bytes_per_s=share * speed.read_bytes_per_s,
        flops_per_s=share * speed.flops_per_s,
        attention_per_s=share * speed.attention_per_s,
        kernels=tuple(
            replace(
                each,
                read_bytes_per_s=share * each.read_bytes_per_s,
                flops_per_s=share * each.flops_per_s,
            )
            for each in speed.kernels
        ),
    )


def at_once(threads: int, machine_threads: int) -> float:
    """How many nodes with so many threads compute on a machine without slowing each other down."""
    return max(1.0, machine_threads / threads) if threads > 0 else 1.0


def nodes_beside(snapshot: Snapshot) -> dict[NodeId, int]:
    """How many nodes compute on the machine of each one, itself included."""
    here = [node for node in snapshot.nodes if node.alive and node.facts.role is not Role.CLIENT]
    count = Counter(node.facts.machine for node in here if node.facts.machine)
    return {node.id: max(1, count[node.facts.machine]) for node in snapshot.nodes}
