"""Which figures of two results differ beyond noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from mesh_llm.frozen import frozen
from mesh_llm.results.document import Document, Figure, ResultTable
from mesh_llm.results.samples import Sample

LEAST_RATIO = 1.05
"""Two runs of the same thing differ by some per cent, however narrow their intervals are."""
LEAST_VALUES = 3
"""With fewer nobody can tell a difference from an accident."""


class Outcome(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "within noise"
    UNKNOWN = "too few values"


@frozen
class FigureChange:
    """One figure, in both results: medians and where each median lies, 19 times in 20."""

    name: str
    unit: str
    before: float
    after: float
    before_within: tuple[float, float]
    after_within: tuple[float, float]
    outcome: Outcome

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before else None


@frozen
class Comparison:
    changes: tuple[FigureChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    facts: tuple[tuple[str, str, str], ...]
    """What the figures depend on, where it differs: name, before, after."""

    @property
    def beyond_noise(self) -> tuple[FigureChange, ...]:
        return tuple(each for each in self.changes if each.outcome in (Outcome.BETTER, Outcome.WORSE))


def compare(before: Document, after: Document) -> Comparison:
    old, new = ({_key(each): each for each in one.figures if each.values} for one in (before, after))
    names = [key for key in old if key in new]
    known = [name for name in before.facts if name in after.facts]
    return Comparison(
        changes=tuple(_change(old[key], new[key]) for key in names),
        only_before=tuple(name for name, unit in old if (name, unit) not in new),
        only_after=tuple(name for name, unit in new if (name, unit) not in old),
        facts=tuple(
            (name, before.facts[name], after.facts[name])
            for name in known
            if before.facts[name] != after.facts[name]
        ),
    )


def _key(figure: Figure) -> tuple[str, str]:
    return figure.name, figure.unit


def _change(old: Figure, new: Figure) -> FigureChange:
    before, after = Sample(old.values), Sample(new.values)
    return FigureChange(
        name=old.name,
        unit=old.unit,
        before=before.median,
        after=after.median,
        before_within=before.interval,
        after_within=after.interval,
        outcome=_outcome(before, after, higher_is_better=old.higher_is_better),
    )


def _outcome(before: Sample, after: Sample, *, higher_is_better: bool) -> Outcome:
    if min(len(before.values), len(after.values)) < LEAST_VALUES:
        return Outcome.UNKNOWN
    (old_low, old_high), (new_low, new_high) = before.interval, after.interval
    apart = old_high < new_low or new_high < old_low
    if not apart or not _far(before.median, after.median):
        return Outcome.SAME
    return Outcome.BETTER if (after.median > before.median) == higher_is_better else Outcome.WORSE


def _far(before: float, after: float) -> bool:
    small, large = sorted((abs(before), abs(after)))
    return before * after < 0 or large > small * LEAST_RATIO


def table(changes: Sequence[FigureChange]) -> ResultTable:
    return ResultTable(
        title="What differs",
        columns=("figure", "before", "after", "ratio", "outcome"),
        rows=tuple(
            (
                each.name,
                _text(each.before, each.before_within, each.unit),
                _text(each.after, each.after_within, each.unit),
                "–" if each.ratio is None else f"{each.ratio:.2f} ×",
                str(each.outcome),
            )
            for each in changes
        ),
        note=f"beyond noise: intervals of the medians (19 times in 20) do not overlap, and the medians are "
        f"at least {LEAST_RATIO - 1:.0%} apart; in brackets those intervals",
    )


def _text(median: float, within: tuple[float, float], unit: str) -> str:
    low, high = within
    return f"{median:.4g} ({low:.4g} to {high:.4g}) {unit}"
