"""What of its memory a node uses itself, and what it lends to others. Pure.

A worker child computes on one device, so a node lends one: its first GPU, or
main memory where it may use none. Planners read this from what a node publishes
of itself, and its own node from the same fields: a plan cannot count on more
than the worker child is given.
"""

from __future__ import annotations

from typing import Protocol

from mesh_llm.frozen import frozen
from mesh_llm.planning.fit import gigabytes
from mesh_llm.types import Device

CPU = "CPU"


class Means(Protocol):
    """What a node may use: `NodeFacts`, and the equipment of a node itself."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def max_memory_bytes(self) -> int | None: ...

    @property
    def gpus(self) -> tuple[Device, ...]: ...

    @property
    def gpu_layers(self) -> int | None: ...


def used_gpus(means: Means) -> tuple[Device, ...]:
    """Those that may get layers."""
    return () if means.gpu_layers == 0 else means.gpus


def bounded(means: Means, size: int) -> int:
    """At most what --max-memory says, of GPUs and main memory together."""
    return max(0, size if means.max_memory_bytes is None else min(size, means.max_memory_bytes))


def usable_bytes(means: Means) -> int:
    """All that the engine of a host may fill."""
    return bounded(means, means.memory_bytes + sum(gpu.free_bytes for gpu in used_gpus(means)))


@frozen
class MemoryBudget:
    device: str
    bytes: int
    layers: int | None
    """At most so many; None: all that fit."""


def loan(means: Means) -> MemoryBudget:
    """What a worker child of this node is given."""
    gpus = used_gpus(means)
    if not gpus:
        return MemoryBudget(device=CPU, bytes=bounded(means, means.memory_bytes), layers=None)
    return MemoryBudget(
        device=gpus[0].name, bytes=bounded(means, gpus[0].free_bytes), layers=means.gpu_layers
    )


def unlent(means: Means) -> str:
    """What a person might expect to be lent, and is not; empty where there is no such thing."""
    lent, others = loan(means), [gpu.name for gpu in used_gpus(means)[1:]]
    if lent.device == CPU:
        return ""
    # Where --max-memory is used up by the GPU, nobody misses the rest.
    if bounded(means, means.memory_bytes) > lent.bytes:
        others.append("main memory")
    if not others and lent.layers is None:
        return ""
    text = f"As a worker this node lends {lent.device} alone, {gigabytes(lent.bytes)}"
    if lent.layers is not None:
        text += f" and at most {lent.layers} layers (--gpu-layers)"
    if others:
        text += f"; {' and '.join(others)} only when it hosts (--device chooses another)"
    return text
