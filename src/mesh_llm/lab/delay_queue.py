"""Hands things on, in order, each when its time has come: a thread that keeps time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from mesh_llm.lab.conditions import Way

T = TypeVar("T")

_HELD_LIMIT_BYTES = 64 << 20
"""On its way at once, as in a large window of TCP: a second of delay leaves 64 MB/s of it."""
_NARROW_S = 0.1
_NARROW_LEAST_BYTES = 64 << 10
"""A narrow way holds what its delay does, and as much more as it sends in this time, as routers do."""
_SPIN_S = 0.0002
"""The last stretch is spent looking at the clock: a sleep wakes up some 100 µs late."""
_PR_SET_TIMERSLACK = 29


class DelayQueue(Generic[T]):
    """`deliver` gets everything that is taken, and None at its end; where it raises OSError, that is the end.

    `keep` makes what has to wait last: what is taken may be overwritten afterwards.
    """

    def __init__(
        self,
        way: Way,
        deliver: Callable[[T | None], None],
        *,
        keep: Callable[[T], T] = lambda item: item,
        drops: bool = False,
    ) -> None:
        self._way = way
        self._deliver = deliver
        self._keep = keep
        self._drops = drops
        """What finds no room is lost; else whoever brings it waits."""
        self._queue: deque[tuple[float, float, int, T | None]] = deque()
        self._held = self._held_bytes = 0
        self._over = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def take(self, item: T, size_bytes: int, *, late_s: float | None = 0.0) -> bool:
        """Pass it on at once, or later by the way's conditions and `late_s`; None: they do not concern it.

        False once there is nobody to pass it on to.
        """
        now = time.perf_counter()
        if not self._held and (late_s is None or self._way.conditions.is_open):
            self._way.count(size_bytes, 0.0)
            self._deliver(item)
            return True
        due = now if late_s is None else self._way.arrival(now, size_bytes) + late_s
        with self._changed:
            while self._held_bytes >= self._limit_bytes() and not self._over:
                if self._drops:
                    self._way.drop()
                    return True
                self._changed.wait()
            if not self._over:
                self._put(now, due, size_bytes, self._keep(item))
            return not self._over

    def end(self) -> None:
        """The end takes as long to be noticed as anything else."""
        now = time.perf_counter()
        with self._changed:
            self._put(now, self._way.arrival(now, 0), 0, None)

    def _put(self, now: float, due: float, size_bytes: int, item: T | None) -> None:
        self._queue.append((now, due, size_bytes, item))
        self._held += 1
        self._held_bytes += size_bytes
        self._changed.notify_all()

    def _limit_bytes(self) -> float:
        conditions = self._way.conditions
        if not conditions.bytes_s:
            return _HELD_LIMIT_BYTES
        holds_bytes = conditions.bytes_s * (conditions.delay_s + _NARROW_S)
        return min(_HELD_LIMIT_BYTES, max(_NARROW_LEAST_BYTES, holds_bytes))

    def _run(self) -> None:
        _no_timer_slack()
        with suppress(OSError):
            while self._pass_one():
                pass
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _pass_one(self) -> bool:
        with self._changed:
            while not self._queue:
                self._changed.wait()
            stamp, due, size_bytes, item = self._queue.popleft()
        _wait_until(due)
        if item is not None:
            # Counted before it is delivered: who has received it may ask for the report at once.
            self._way.count(size_bytes, time.perf_counter() - stamp)
        self._deliver(item)
        with self._changed:
            self._held -= 1
            self._held_bytes -= size_bytes
            self._changed.notify_all()
        return item is not None


def _wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < moment:
        pass


def _no_timer_slack() -> None:
    """Linux rounds a thread's sleeps up by 50 µs unless told not to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
