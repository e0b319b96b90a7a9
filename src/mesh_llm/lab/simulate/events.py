"""Events in the order of their time: the clock jumps from one to the next, and idle time costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class EventQueue:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, what = heappop(events)
            what()
        self.now = end

    def run_until(self, met: Callable[[], bool], *, within_s: float, step_s: float = 0.25) -> float:
        """Seconds that it took."""
        begun = self.now
        while not met():
            assert self.now - begun < within_s, f"not within {within_s} s"
            self.run(step_s)
        return self.now - begun
