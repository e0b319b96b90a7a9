"""What this machine brings to a mesh: native libraries, devices, memory, speed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import build, gpus, machine
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.kernel_speed import measured_kernels
from mesh_llm.engine.speed import known_speed, measured_speed
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder
from mesh_llm.planning.memory_budget import CPU, loans
from mesh_llm.planning.model_speed import kernels_of
from mesh_llm.planning.solo_fit import choose_devices
from mesh_llm.types import Device, DeviceKind, LentDevice, ModelFacts, NodeFacts, ProgressSink, Speed

BUILDING = (
    "Engine: using the wheel's own CPU code while a library for this processor is being built; "
    "answers will be quicker afterwards"
)


@frozen
class Hardware:
    libraries: dict[str, Path]
    """Of the engine, by backend."""
    splice: Path | None
    """Copies between links and QUIC without Python; None where it could not be built."""
    gpus: tuple[Device, ...]
    """Those that it may use; none means the CPU."""
    memory_bytes: int
    """Main memory that it may use, before a model was loaded."""
    machine_memory_bytes: int
    machine: str
    speed: Speed | None
    """Of its first GPU, or of the CPU."""
    speeds: dict[str, Speed | None] = field(default_factory=dict)
    """Of all devices that it lends."""
    lends_memory: bool = True
    """Beside its GPUs."""
    gpu_layers: int | None = None
    cpu_moe: int = 0
    """Experts of the first so many layers on a GPU lie in main memory."""
    max_memory_bytes: int | None = None
    """Of main memory and GPUs together."""
    cores: int = 0
    """Threads that nodes of this machine share; 0 where this one has its own, or computes on a GPU."""
    threads: int = 0
    """Its own number of them; 0 where it shares them, or computes on a GPU."""
    engine: str = ENGINE_VERSION
    builds: bool = False
    """Whether its CPU library has yet to be compiled. Until then the engine's own CPU code does its work."""

    @property
    def cpu_library(self) -> str:
        """Names the code that its CPU computes with; empty where it is the engine's own."""
        path = self.libraries.get("cpu")
        return "" if path is None else hashlib.sha256(str(path).encode()).hexdigest()[:16]

    @property
    def devices(self) -> tuple[LentDevice, ...]:
        """Those that it lends, one or more."""
        return loans(self, with_memory=self.lends_memory, speeds=self.speeds)

    def library_paths(self) -> dict[str, str]:
        return {name: str(path) for name, path in self.libraries.items()}

    def facts(self) -> dict[str, Any]:
        """What a node tells of it, as fields of `NodeFacts`."""
        devices = self.devices
        return {
            "engine": self.engine,
            "machine": self.machine,
            "memory_bytes": self.memory_bytes,
            "machine_memory_bytes": self.machine_memory_bytes,
            "max_memory_bytes": self.max_memory_bytes,
            "gpus": self.gpus,
            "devices": devices if len(devices) > 1 or devices[0].experts_bytes else (),
            "gpu_layers": self.gpu_layers,
            "cpu_moe": self.cpu_moe,
            "speed": self.speed,
            "cores": self.cores,
            "cpu_library": self.cpu_library,
            "builds": self.builds,
            "threads": self.threads,
            "machine_threads": machine.threads(),
        }

    def beside(self, left: NodeFacts) -> Hardware:
        """What other models leave of it."""
        return replace(
            self, memory_bytes=left.memory_bytes, max_memory_bytes=left.max_memory_bytes, gpus=left.gpus
        )

    def without(self, held_bytes: int) -> Hardware:
        """The same, with so much of its main memory spoken for."""
        most = self.max_memory_bytes
        return replace(
            self,
            memory_bytes=max(0, self.memory_bytes - held_bytes),
            max_memory_bytes=None if most is None else max(0, most - held_bytes),
        )


@frozen
class Libraries:
    """What native code could be had."""

    engine: build.Built
    splice: Path | None


async def build_libraries(config: NodeConfig, progress: ProgressSink) -> Libraries:
    """Build what cannot wait. The CPU library can, where it would have to be compiled (`finish` does it)."""
    wanted = build.STANDARD if keeps_to_cpu(config) else build.usual()
    engine = await build.ensure(wanted, progress, later=("cpu",))
    splice = await build.ensure((build.SPLICE,), progress)
    return Libraries(engine=engine, splice=splice.libraries.get(build.SPLICE))


async def equip(
    config: NodeConfig,
    found: Libraries,
    *,
    say: Callable[[str], None],
    held_bytes: int = 0,
    model: ModelFacts | None = None,
) -> Hardware:
    """Look at the devices, and measure them if nobody has.

    `held_bytes` of main memory are spoken for. With a `model`, what it is made of is measured, too.
    """
    if config.bin_dir is not None:
        say(f"Engine: llama-server in {config.bin_dir}")
    built = found.engine
    if "cpu" in built.missing:
        say(without_cpu_library(built.missing["cpu"]))
    builds = "cpu" in built.later and config.bin_dir is None
    if builds:
        say(BUILDING)
    described = await describe(built.libraries)
    for text in without_gpus(config, built, described["unusable"]):
        say(text)
    libraries, devices = _usable(built.libraries, described)
    use = chosen(config, devices)
    hardware = equipped(config, libraries, found.splice, use, None).without(held_bytes)
    return await _with_measured_speeds(config, replace(hardware, builds=builds), model)


async def finish(
    config: NodeConfig,
    hardware: Hardware,
    *,
    say: Callable[[str], None],
    progress: ProgressSink,
    model: ModelFacts | None = None,
) -> Hardware:
    """The same machine with its CPU library, which is compiled now; without it where that fails."""
    built = await build.ensure(build.STANDARD, progress, gentle=True)
    path = built.libraries.get("cpu")
    if path is None:
        say(without_cpu_library(built.missing["cpu"]))
        return replace(hardware, builds=False)
    own = {name: path for name, path in built.libraries.items() if name in ("cpu", *hardware.libraries)}
    found = replace(hardware, libraries=own | hardware.libraries, builds=False)
    return await _with_measured_speeds(config, found, model)


async def _with_measured_speeds(config: NodeConfig, hardware: Hardware, model: ModelFacts | None) -> Hardware:
    speeds = {
        name: await _measured(hardware.libraries, name, _threads(config), model)
        for name in dict.fromkeys(measured_as(hardware).values())
    }
    return _with_speeds(hardware, speeds)


def without_cpu_library(error: MeshError) -> str:
    return f"Engine: using the wheel's own, slower CPU code: {error.message}"


async def _measured(
    libraries: dict[str, Path], device: str, threads: int, model: ModelFacts | None
) -> Speed | None:
    speed = await measured_speed(libraries, device, threads, cache=_speeds())
    if speed is None or model is None:
        return speed
    kernels = await measured_kernels(libraries, device, threads, kernels_of(model), cache=_speeds())
    return replace(speed, kernels=kernels)


async def at_hand(config: NodeConfig, model: ModelFacts | None = None) -> Hardware:
    """The same, with what there is: nothing is built, and no device measured.

    One whose speed is known is measured with what the `model` is made of: a second or two.
    """
    built = build.at_hand().libraries
    if keeps_to_cpu(config):
        built = {name: path for name, path in built.items() if name in build.STANDARD}
    libraries, devices = _usable(built, await describe(built))
    use = chosen(config, devices)
    found = equipped(config, libraries, None, use, None)
    speeds: dict[str, Speed | None] = {}
    for name in dict.fromkeys(measured_as(found).values()):
        known = known_speed(libraries, name, _threads(config), cache=_speeds())
        speeds[name] = await _measured(libraries, name, _threads(config), model) if known else None
    return _with_speeds(found, speeds)


def keeps_to_cpu(config: NodeConfig) -> bool:
    """Then libraries for GPUs are not even loaded: the engine takes prompts to every device that it knows."""
    return config.devices in (("none",), ("CPU",)) or config.gpu_layers == 0


def without_gpus(config: NodeConfig, built: build.Built, unusable: dict[str, str]) -> Iterator[str]:
    """A line for each GPU library that does not do, and one for GPUs that there is none for."""
    failed = {kind: error for kind, error in built.missing.items() if kind in gpus.KINDS}
    for kind, error in failed.items():
        mend = f" ({error.hint})" if error.hint else ""
        yield f"Engine: without libggml-{kind}: {error.message}{mend}"
    for kind, why in unusable.items():
        yield f"Engine: {gpus.broken_text(kind, why)}"
    # A llama-server of the user's own may well use what ours does not.
    asked = not keeps_to_cpu(config) and config.bin_dir is None
    if asked and (idle := gpus.idle(gpus.found(), {*built.libraries, *failed})):
        yield f"Engine: {gpus.idle_text(idle)}"


def _usable(
    libraries: dict[str, Path], described: dict[str, Any]
) -> tuple[dict[str, Path], tuple[Device, ...]]:
    """The libraries that work, and the devices with them."""
    working = {name: path for name, path in libraries.items() if name not in described["unusable"]}
    return working, _devices(described)


def chosen(config: NodeConfig, present: tuple[Device, ...]) -> tuple[Device, ...]:
    """The GPUs to use. Without a layer on any of them, it is the CPU that computes, and is measured."""
    use = choose_devices(config.devices, present)
    return () if config.gpu_layers == 0 else use


def measured_as(hardware: Hardware) -> dict[str, str]:
    """The devices whose speeds count, the first one's first, and which is measured for each: GPUs of equal
    description are equally fast."""
    first = {gpu.description: gpu.name for gpu in reversed(hardware.gpus)}
    found = {gpu.name: first[gpu.description] for gpu in hardware.gpus}
    if not found or hardware.cpu_moe or any(device.name == CPU for device in hardware.devices):
        found[CPU] = CPU
    return found


def _with_speeds(hardware: Hardware, speeds: dict[str, Speed | None]) -> Hardware:
    found = {device: speeds[name] for device, name in measured_as(hardware).items()}
    if hardware.cpu_moe:
        # Most of what a token reads is the experts that were chosen for it.
        found = dict.fromkeys(found, found[CPU])
    return replace(hardware, speed=next(iter(found.values())), speeds=found)


def _threads(config: NodeConfig) -> int:
    return config.threads or machine.threads()


def _speeds() -> Path:
    return cache_folder() / "speed"


def equipped(
    config: NodeConfig,
    libraries: dict[str, Path],
    splice: Path | None,
    use: tuple[Device, ...],
    speed: Speed | None,
) -> Hardware:
    free, most = machine.available_memory(), config.max_memory_bytes
    return Hardware(
        libraries=libraries,
        splice=splice,
        gpus=use,
        memory_bytes=free if most is None else min(free, most),
        machine_memory_bytes=free,
        machine=machine.identity(),
        speed=speed,
        # It is for the weights that its user wants there.
        lends_memory=(config.devices is None or CPU in config.devices) and not config.override_tensor,
        gpu_layers=config.gpu_layers,
        cpu_moe=config.expert_layers if use else 0,
        max_memory_bytes=most,
        cores=0 if use or config.threads else machine.threads(),
        threads=0 if use else config.threads or 0,
    )


def _devices(description: dict[str, Any]) -> tuple[Device, ...]:
    return tuple(
        Device(**{**fields, "kind": DeviceKind(fields["kind"])}) for fields in description["devices"]
    )
