"""How long something is measured, and in which order the sides take their turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Numbers of rounds, until all are done or their time is up.

    The first is always given, and none is cut in two: a busy machine makes
    fewer rounds of it, all of them whole.
    """

    wanted: int
    budget_s: float
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    done: int = 0

    def __iter__(self) -> Iterator[int]:
        deadline = self.clock() + self.budget_s
        while self.done < self.wanted and (not self.done or self.clock() < deadline):
            self.done += 1
            yield self.done - 1

    def note(self) -> str:
        if self.done == self.wanted:
            return f"rounds: {self.done}"
        return f"rounds: {self.done} of the {self.wanted} planned: time was up, the machine is busy"


def turns(sides: Sequence[T], round_number: int) -> list[T]:
    """Each round begins with another side: being first, or after a certain other, favours nobody."""
    first = round_number % len(sides)
    return [*sides[first:], *sides[:first]]
