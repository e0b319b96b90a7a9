"""Wait for a condition, never for a while.

A machine that others use, too, may stand still for minutes: what takes a second then takes ten. Waits
count the time that it ran, so that it makes tests slow and not red.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02
POLL_SHARE = 4
"""Times what a look took, to the next one: looks that start a program take a core from others."""
LOOK_S = 1.0
"""Between two looks at what others took: its clock ticks a hundred times a second."""
STRETCH = 6
"""Times the bound, after which a wait is over whatever the machine did."""

_STAT = Path("/proc/stat")
_IDLE, _STEAL = (3, 4), 7
"""Fields of the line for all processors: idle and waiting for a disk; wanted, and given to others."""


class Patience:
    """A bound in seconds that this machine ran."""

    def __init__(
        self,
        within_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        shares: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`shares`: how much of the processors' time was used here so far, and how much others took."""
        self._within_s = within_s
        self._clock = clock
        self._shares = shares or _shares
        self._began = self._looked = clock()
        self._seen = self._shares()
        self._counted_s = 0.0

    @property
    def is_over(self) -> bool:
        now = self._clock()
        if now - self._began > STRETCH * self._within_s:
            return True
        if now - self._looked >= LOOK_S:
            self._count(now)
        return self._counted_s + now - self._looked > self._within_s

    def _count(self, now: float) -> None:
        used, taken = self._shares()
        mine, others = used - self._seen[0], taken - self._seen[1]
        wanted = mine + others
        self._counted_s += (now - self._looked) * (mine / wanted if wanted > 0 else 1.0)
        self._looked, self._seen = now, (used, taken)


def _shares() -> tuple[int, int]:
    try:
        ticks = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:]]
    except OSError:
        return 0, 0
    taken = ticks[_STEAL]
    return sum(ticks[:_STEAL]) - sum(ticks[field] for field in _IDLE), taken


def until(condition: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """The first true value of `condition`, or a failure that says what was waited for.

    The last look is after the deadline: one that was missed meanwhile, as the machine stood still, counts.
    """
    patience = Patience(within_s)
    while True:
        is_last = patience.is_over
        looked = time.monotonic()
        if value := condition():
            return value
        if is_last:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(max(POLL_S, POLL_SHARE * (time.monotonic() - looked)))
