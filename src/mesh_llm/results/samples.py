"""Medians, quartiles and paired comparisons. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen, in the order in which it was seen."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one value")

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third; of a single value that value itself."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median of many more rounds would lie, 19 times in 20: the sign test's interval.

        It assumes nothing about how the values scatter. Below six it is all that was seen.
        """
        ordered, count = sorted(self.values), len(self.values)
        skipped = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
        return ordered[skipped], ordered[count - 1 - skipped]

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        first, third = self.quartiles
        return spread_over(third - first, self.median)


def spread_over(distance: float, whole: float) -> float:
    if distance == 0:
        return 0.0
    return abs(distance / whole) if whole else float("inf")


def paired(
    ours: Sequence[float], theirs: Sequence[float], combine: Callable[[float, float], float]
) -> Sample:
    """One figure per round: what slows a whole round down slows both sides, and drops out."""
    return Sample(tuple(combine(our, their) for our, their in zip(ours, theirs, strict=True)))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Sample:
    return paired(ours, theirs, operator.truediv)


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Sample:
    return paired(ours, theirs, operator.sub)
