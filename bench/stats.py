"""Targets and verdicts. Pure: numbers in, numbers out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from mesh_llm.results.samples import Sample

NOISE_LIMIT = 0.15
"""Above it quartiles lie so far apart that another run may well say something else."""

LEAST_ROUNDS = 3
"""Of a comparison: with fewer nobody can tell a difference from an accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound that the figure has to keep, in the figure's own unit."""

    sign: str
    limit: float

    def met_by(self, value: float) -> bool:
        return _KEEPS[self.sign](value, self.limit)


_KEEPS: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


def at_least(limit: float) -> Target:
    return Target(sign="≥", limit=limit)


def at_most(limit: float) -> Target:
    return Target(sign="≤", limit=limit)


def below(limit: float) -> Target:
    return Target(sign="<", limit=limit)


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    NOISY_MET = "noisy (the median meets it)"
    NOISY_MISSED = "noisy (the median misses it)"
    NOISY = "noisy"
    REPORTED = "reported"


def judge(sample: Sample, spread: float, target: Target | None, *, rounds: int = 1) -> Verdict:
    """Noisy: fewer values than `rounds`, quartiles far apart, or the target within what the median may be."""
    noisy = len(sample.values) < rounds or spread > NOISE_LIMIT
    if target is None:
        return Verdict.NOISY if noisy else Verdict.REPORTED
    low, high = sample.interval
    noisy = noisy or target.met_by(low) != target.met_by(high)
    if target.met_by(sample.median):
        return Verdict.NOISY_MET if noisy else Verdict.MET
    return Verdict.NOISY_MISSED if noisy else Verdict.MISSED
