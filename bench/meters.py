"""What processes hold and read, and what went over links. Linux: everything is in /proc."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mesh_llm.lab.delay import Passage

_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ \d+\s*(.*)$")
_QUIET_S, _WINDOW_S = 2.0, 0.2
_LEFT_ALONE = 0.4
"""Cores that others may use in a moment that counts as quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a process has read since its start."""

    disk_bytes: int
    """Fetched from the disk for it, by reads and by faults."""
    call_bytes: int
    """Through read(), from the page cache as well, and from its links."""
    major_faults: int
    minor_faults: int

    def __sub__(self, earlier: Reads) -> Reads:
        return Reads(
            disk_bytes=self.disk_bytes - earlier.disk_bytes,
            call_bytes=self.call_bytes - earlier.call_bytes,
            major_faults=self.major_faults - earlier.major_faults,
            minor_faults=self.minor_faults - earlier.minor_faults,
        )


def reads(pids: Iterable[int]) -> Reads:
    """Of several processes together."""
    total = Reads(disk_bytes=0, call_bytes=0, major_faults=0, minor_faults=0)
    for pid in pids:
        io = dict(line.split(": ") for line in _proc(pid, "io").splitlines())
        # The name in brackets may hold anything; what follows the last one may not.
        fields = _proc(pid, "stat").rpartition(")")[2].split()
        total = Reads(
            disk_bytes=total.disk_bytes + int(io["read_bytes"]),
            call_bytes=total.call_bytes + int(io["rchar"]),
            major_faults=total.major_faults + int(fields[9]),
            minor_faults=total.minor_faults + int(fields[7]),
        )
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    rss_bytes: int
    peak_bytes: int
    model_bytes: int
    """Of the RSS: pages of the model's own files."""


def memory(pid: int, files: Sequence[Path]) -> Memory:
    status = dict(line.split(":", 1) for line in _proc(pid, "status").splitlines())
    return Memory(
        rss_bytes=_kilobytes(status["VmRSS"]),
        peak_bytes=_kilobytes(status["VmHWM"]),
        model_bytes=mapped_bytes(_proc(pid, "smaps"), {os.path.realpath(file) for file in files}),
    )


def mapped_bytes(smaps: str, paths: set[str]) -> int:
    """Resident bytes of the mappings of some files."""
    total, counted = 0, False
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            counted = found[1] in paths
        elif counted and line.startswith("Rss:"):
            total += _kilobytes(line.partition(":")[2])
    return total


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text("utf-8", errors="replace")


def buffers(log: str) -> dict[str, dict[str, int]]:
    """Bytes by device and kind, as llama.cpp logs them when it loads a model."""
    found: dict[str, dict[str, int]] = {}
    for device, kind, mebibytes in _BUFFER.findall(log):
        kinds = found.setdefault(device, {})
        kinds[kind] = kinds.get(kind, 0) + round(float(mebibytes) * (1 << 20))
    return found


def moved(before: Sequence[Passage], after: Sequence[Passage]) -> list[int]:
    """Bytes in each direction between two readings of the same lines."""
    return [late.size_bytes - early.size_bytes for early, late in zip(before, after, strict=True)]


def measured_delay_ms(passages: Sequence[Passage]) -> float:
    """One way, over all lines that carried anything: the mean of their medians."""
    busy = [passage.median_ms for passage in passages if passage.chunks]
    return sum(busy) / len(busy) if busy else 0.0


async def quiet() -> None:
    """Wait a little for a moment in which others leave a core alone; on a busy machine it does not come.

    Everything measured has to be idle. It is also the pause between two sides.
    """
    for _ in range(round(_QUIET_S / _WINDOW_S)):
        before = _machine_s()
        await asyncio.sleep(_WINDOW_S)
        busy, wall = (late - early for early, late in zip(before, _machine_s(), strict=True))
        if busy < _LEFT_ALONE * wall:
            return


class Bystanders:
    """How many cores everybody else used since this was made."""

    def __init__(self) -> None:
        self._all = _machine_s()
        self._own = _own_s()

    def cores(self) -> float:
        busy, wall = (late - early for early, late in zip(self._all, _machine_s(), strict=True))
        # Children that have ended since are counted by their parent, as the kernel does.
        return max(0.0, (busy - (_own_s() - self._own)) / wall) if wall > 0 else 0.0


def _machine_s() -> tuple[float, float]:
    """Seconds of work on all cores, and of wall time."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(times[:8])
    return total - idle, total / (os.cpu_count() or 1)


def _own_s() -> float:
    us = psutil.Process()
    own = us.cpu_times()
    total: float = own.user + own.system + own.children_user + own.children_system
    for child in us.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
