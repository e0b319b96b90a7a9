"""Wait for a condition, never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


def until(condition: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """The first true value of `condition`, or a failure that says what was waited for.

    The last look is after the deadline: one that was missed meanwhile, as the machine stood still, counts.
    """
    deadline = time.monotonic() + within_s
    while True:
        is_last = time.monotonic() > deadline
        if value := condition():
            return value
        if is_last:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(POLL_S)
