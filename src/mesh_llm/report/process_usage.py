"""What this node's processes use of the machine, as the system counts it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil

from mesh_llm.frozen import frozen


@frozen
class Usage:
    resident_bytes: int = 0
    """Of main memory; mapped files count where they are in it."""
    open_fds: int = 0
    cpu_s: float = 0.0

    def plus(self, other: Usage) -> Usage:
        return Usage(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            open_fds=self.open_fds + other.open_fds,
            cpu_s=self.cpu_s + other.cpu_s,
        )


def usage(pids: Iterable[int], *, with_children: bool = False) -> Usage:
    """Of all of them together; one that has ended meanwhile uses nothing."""
    total = Usage()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            # Looking for children goes through all processes of the machine.
            for each in (process, *(process.children() if with_children else ())):
                total = total.plus(_of(each))
    return total


def _of(process: psutil.Process) -> Usage:
    with process.oneshot():
        times = process.cpu_times()
        return Usage(
            resident_bytes=process.memory_info().rss,
            open_fds=process.num_fds(),
            cpu_s=times.user + times.system,
        )
