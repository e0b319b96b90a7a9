"""What this machine is: its processor, its memory, how many threads to use."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

MEMORY_RESERVE_BYTES = 512 << 20
MEMORY_RESERVE_SHARE = 0.03
"""Left to the system and the node itself when a model is fitted: the larger of the two."""


_CGROUP = Path("/sys/fs/cgroup")


def platform_name() -> str:
    return f"{platform.system().lower()}-{platform.machine().lower()}"


def cpu_identity() -> str:
    """Changes when native code for this CPU would: a home folder may move to another machine."""
    facts = [platform.machine(), platform.processor()]
    with suppress(OSError):
        wanted = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(wanted)})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def cpu_features() -> frozenset[str] | None:
    """Instruction sets that every core has, as the kernel names them; None where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*cores)) if cores else None


def identity() -> str:
    """Equal for processes that share this machine, and can hand each other sockets."""
    facts = [platform.node()]
    # The network namespace, too: what is apart in that may be apart in its files and its memory.
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            facts.append(Path(path).read_text())
    with suppress(OSError):
        facts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def threads() -> int:
    """Physical cores that this process may use; hyper-threads only slow the kernels down."""
    return max(1, min(psutil.cpu_count(logical=False) or cores(), cores()))


def cores() -> int:
    """Hardware threads that this process may use: compilers have work for all of them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _cgroup_cores() or allowed)


def _cgroup_cores() -> int | None:
    """Whole cores granted to a container."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def memory_text(device: Mapping[str, Any]) -> str:
    """Of a device as `describe` tells it. ggml calls all of main memory free, whoever has it."""
    free, total = device["free_bytes"] / 1e9, device["total_bytes"] / 1e9
    return f"{total:.1f} GB" if device["kind"] == "cpu" else f"{free:.1f} of {total:.1f} GB free"


def available_memory() -> int:
    """Bytes of main memory that a model may take without pushing others out."""
    memory = psutil.virtual_memory()
    available = memory.available
    limit = _cgroup_number("memory.max")
    if limit is not None:
        available = min(available, limit - (_cgroup_number("memory.current") or 0) + _cgroup_cache())
    reserve = max(MEMORY_RESERVE_BYTES, int(memory.total * MEMORY_RESERVE_SHARE))
    return max(0, available - reserve)


def total_memory() -> int:
    total = psutil.virtual_memory().total
    return min(total, _cgroup_number("memory.max") or total)


def _cgroup_number(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _cgroup_cache() -> int:
    """File pages count as used in a container, and go when memory is needed."""
    return _figure(_CGROUP / "memory.stat", "inactive_file")


def oom_kills() -> int:
    """How often the kernel has killed something for want of memory, since it started."""
    return _figure(Path("/proc/vmstat"), "oom_kill")


def _figure(path: Path, name: str) -> int:
    """Of a file of the kernel's with a name and a number in each line; 0 where it has none."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
