"""What processes hold and read. Linux: everything is in /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ \d+\s*(.*)$")


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
