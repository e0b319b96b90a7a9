"""What a worker child is told: it lends one device, whatever models its hosts have."""

from __future__ import annotations

from pathlib import Path

from mesh_llm.config import NodeConfig
from mesh_llm.engine.gpus import KINDS
from mesh_llm.engine.spec import MainMemorySpec, WorkerSpec
from mesh_llm.errors import LinkRefused
from mesh_llm.host.launch import threads
from mesh_llm.local.hardware import Hardware
from mesh_llm.planning.memory_budget import CPU
from mesh_llm.types import LentDevice


def worker_spec(
    config: NodeConfig, hardware: Hardware, socket: Path, device: str = "", *, nodes_here: int
) -> WorkerSpec:
    """For one of the devices that this node lends; without a name, for the first."""
    devices = hardware.devices
    index = next((index for index, each in enumerate(devices) if device in ("", each.name)), None)
    if index is None:
        raise LinkRefused("this node does not lend such a device")
    lent, suffix = devices[index], f".{index}" if index else ""
    # One for main memory has no use for a GPU's library, which takes memory of the GPU.
    needless = KINDS if lent.name == CPU else ()
    # One that has the CPU library is started beside one that still works without.
    code = "" if hardware.cpu_library else ".o"
    return WorkerSpec(
        socket=f"{socket}{suffix}{code}",
        device=lent.name,
        threads=threads(config, nodes_here),
        quota_bytes=lent.bytes,
        libraries={name: path for name, path in hardware.library_paths().items() if name not in needless},
        trace=f"{config.trace}.worker{suffix}" if config.trace else None,
        main_memory=_main_memory(config, hardware, lent),
    )


def _main_memory(config: NodeConfig, hardware: Hardware, lent: LentDevice) -> MainMemorySpec | None:
    if lent.name == CPU or not config.in_main_memory:
        return None
    return MainMemorySpec(
        pattern=config.in_main_memory,
        layers=config.expert_layers or None,
        quota_bytes=lent.experts_bytes or hardware.memory_bytes,
    )
