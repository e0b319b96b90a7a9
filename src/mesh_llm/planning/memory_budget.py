"""What of its memory a node uses itself, and what it lends to others. Pure.

A worker child computes on one device, so a node has one for each device that it lends: its GPUs, then
main memory. It publishes what it gives to each of them: a plan cannot count on more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from mesh_llm.planning.fit import gigabytes
from mesh_llm.types import Device, DeviceKind, LentDevice, NodeFacts, Speed

CPU = "CPU"
_METAL = "MTL"


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

    @property
    def cpu_moe(self) -> int: ...


def used_gpus(means: Means) -> tuple[Device, ...]:
    """Those that may get layers."""
    return () if means.gpu_layers == 0 else means.gpus


def most_bytes(means: Means) -> int | None:
    """Of GPUs and main memory together: --max-memory, and what they share once; None: no such bound."""
    gpus = used_gpus(means)
    if not any(is_unified(gpu) for gpu in gpus):
        return means.max_memory_bytes
    there = means.memory_bytes + sum(gpu.free_bytes for gpu in gpus if not is_unified(gpu))
    return there if means.max_memory_bytes is None else min(there, means.max_memory_bytes)


def is_unified(gpu: Device) -> bool:
    """Its memory is a part of main memory."""
    return gpu.kind is DeviceKind.INTEGRATED or gpu.name.startswith(_METAL)


def usable_bytes(means: Means) -> int:
    """All that the engine of a host may fill."""
    size, most = means.memory_bytes + sum(gpu.free_bytes for gpu in used_gpus(means)), most_bytes(means)
    return max(0, size if most is None else min(size, most))


def loans(
    means: Means, *, with_memory: bool, speeds: Mapping[str, Speed | None] | None = None
) -> tuple[LentDevice, ...]:
    """What the worker children of a node are given, one or more; `with_memory`: main memory beside GPUs."""
    gpus, most = used_gpus(means), most_bytes(means)
    if means.gpu_layers is not None:
        # A bound on the layers of all its GPUs: the first has them.
        gpus = gpus[:1]
    sizes = [(gpu.name, gpu.free_bytes) for gpu in gpus]
    # What the experts of its GPUs need is not lent beside them.
    experts = means.memory_bytes if means.cpu_moe and gpus else 0
    if not gpus or (with_memory and not experts):
        sizes.append((CPU, means.memory_bytes))
    left = sum(max(0, size) for _, size in sizes) if most is None else most
    found = []
    for name, size in sizes:
        given = max(0, min(size, left))
        left -= given
        layers = None if name == CPU else means.gpu_layers
        speed = speeds.get(name) if speeds else None
        found.append(LentDevice(name=name, bytes=given, layers=layers, speed=speed))
    if experts:
        each_bytes = max(0, experts if most is None else min(experts, left)) // len(found)
        found = [replace(each, experts_bytes=each_bytes) for each in found]
    return tuple(each for each in found if each.bytes) or tuple(found[:1])


def lent_devices(facts: NodeFacts) -> tuple[LentDevice, ...]:
    """Those of a worker; a node that names none lends its first."""
    if facts.devices:
        return facts.devices
    if not used_gpus(facts):
        # As most do, so without the general rule's expense: a plan asks for every node.
        size, most = facts.memory_bytes, facts.max_memory_bytes
        return (LentDevice(name=CPU, bytes=max(0, size if most is None else min(size, most))),)
    return loans(facts, with_memory=False)[:1]


def lent_text(devices: tuple[LentDevice, ...]) -> str:
    """What a worker lends, in a sentence; empty where that is main memory, as on most machines."""
    if [device.name for device in devices] == [CPU]:
        return ""
    *others, last = map(_text, devices)
    return f"As a worker this node lends {', '.join(others)}{' and ' if others else ''}{last}"


def _text(device: LentDevice) -> str:
    name = "main memory" if device.name == CPU else device.name
    layers = "" if device.layers is None else f", at most {device.layers} layers"
    experts = f", experts in main memory: {gigabytes(device.experts_bytes)}" if device.experts_bytes else ""
    return f"{name} ({gigabytes(device.bytes)}{layers}{experts})"
