"""Other people's work on this machine: waiting for a quiet moment, and telling how busy it was."""

from __future__ import annotations

import asyncio
import os

import psutil

_QUIET_S, _WINDOW_S = 2.0, 0.2
_TOO_BUSY = 0.5
"""Cores that others use: from here on figures say little."""
_LEFT_ALONE = 0.4
"""Cores that others may use in a moment that counts as quiet."""


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

    def text(self) -> str:
        cores = self.cores()
        text = f"others used {cores:.1f} cores meanwhile"
        if cores < _TOO_BUSY:
            return text
        return (
            f"{text}: stages cannot show that they overlap, and the kernel serves a process that sleeps "
            "between its turns before one that computes all the time, so that comparisons with the engine "
            "alone flatter splits"
        )


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
