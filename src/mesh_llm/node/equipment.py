"""What this machine brings to a mesh: native libraries, devices, memory, speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import build, machine
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.speed import measured_speed
from mesh_llm.home import cache_folder
from mesh_llm.planning.choice import choose_devices
from mesh_llm.types import Device, DeviceKind, ProgressSink, Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
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
    engine: str = ENGINE_VERSION

    @property
    def device(self) -> str:
        """The one that is lent to others."""
        return self.gpus[0].name if self.gpus else "CPU"

    @property
    def quota_bytes(self) -> int:
        return self.gpus[0].free_bytes if self.gpus else self.memory_bytes


async def equip(config: NodeConfig, *, say: Callable[[str], None], progress: ProgressSink) -> Equipment:
    """Build what is missing, look at the devices, and measure them if nobody has."""
    if config.bin_dir is not None:
        say(f"Engine: llama-server in {config.bin_dir}")
    built = await build.ensure(build.STANDARD, progress)
    splice = await build.ensure((build.SPLICE,), progress)
    if "cpu" in built.missing:
        say(f"Engine: using the wheel's own, slower CPU code: {built.missing['cpu'].message}")
    gpus = choose_devices(config.devices, _devices(await describe(built.libraries)))
    free = machine.available_memory()
    speed = await measured_speed(
        built.libraries,
        gpus[0].name if gpus else "CPU",
        config.threads or machine.threads(),
        cache=cache_folder() / "speed",
    )
    return Equipment(
        libraries=built.libraries,
        splice=splice.libraries.get(build.SPLICE),
        gpus=gpus,
        memory_bytes=min(free, config.max_memory_bytes or free),
        machine_memory_bytes=free,
        machine=machine.identity(),
        speed=speed,
    )


def _devices(description: dict[str, Any]) -> tuple[Device, ...]:
    return tuple(
        Device(**{**fields, "kind": DeviceKind(fields["kind"])}) for fields in description["devices"]
    )
