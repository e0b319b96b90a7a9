"""How often a model runs, and when requests wait for it. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Container
from itertools import count

from mesh_llm.mesh_settings import ModelSettings

CROWDED_AFTER_S = 3.0
"""That requests have to wait without a pause: a short rush is over before another engine has started."""
CROWDED_UNTIL_S = 300.0
"""That at most half of the turns have to be taken, before a replica may go: loading it again takes long."""


def wanted_replicas(settings: ModelSettings, crowded: int) -> int:
    """One more than those that are `crowded`, within what owners have set."""
    return min(max(1 + crowded, settings.least_replicas), settings.most_replicas)


def first_unused(numbers: Container[int]) -> int:
    return next(number for number in count() if number not in numbers)


class Crowding:
    """Whether an engine has more to do than it can: slow to say so, and slower to take it back."""

    def __init__(self) -> None:
        self.is_crowded = False
        self._waits_since_s: float | None = None
        self._busy_s = 0.0
        """When more than half of the turns were taken last."""

    def look(self, *, now: float, taken: int, waiting: int, slots: int) -> bool:
        if taken + waiting > slots // 2:
            self._busy_s = now
        if not waiting:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now
        if self._waits_since_s is not None and now - self._waits_since_s >= CROWDED_AFTER_S:
            self.is_crowded = True
        elif now - self._busy_s >= CROWDED_UNTIL_S:
            self.is_crowded = False
        return self.is_crowded
