"""A measurement as people and programs read it: Markdown and JSON from one value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.stats import LEAST_ROUNDS, Target, Verdict, judge
from mesh_llm.results.markdown import table
from mesh_llm.results.samples import Sample, differences, ratios, spread_over

RESULTS = Path(__file__).parent / "results"
_HEAD = (
    "measure",
    "ours",
    "other side",
    "figure",
    "quartiles",
    "spread",
    "median within",
    "target",
    "verdict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: who it is, and what it showed."""

    name: str
    sample: Sample
    unit: str
    digits: int = 1

    def text(self) -> str:
        first, third = self.sample.quartiles
        median = f"{self.sample.median:.{self.digits}f}"
        if len(self.sample.values) == 1:
            return f"{self.name} {median} {self.unit}"
        return f"{self.name} {median} ({first:.{self.digits}f}–{third:.{self.digits}f}) {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table. `figure` is what the target speaks of."""

    measure: str
    ours: Side
    theirs: Side | None = None
    figure: Sample
    unit: str
    digits: int = 2
    scale: float | None = None
    """What the figure's spread is a share of; its own median unless it is a difference."""
    target: Target | None = None
    least_rounds: int = 1
    """Fewer rounds than these prove nothing."""
    judged: float | None = None
    """The value that is held against the target, where it is not the median."""

    @property
    def spread(self) -> float:
        if self.scale is None:
            return self.figure.spread
        first, third = self.figure.quartiles
        return spread_over(third - first, self.scale)

    @property
    def verdict(self) -> Verdict:
        if self.judged is not None:
            # The worst that was seen: it needs no quartiles to be trusted.
            return judge(Sample((self.judged,)), 0.0, self.target)
        return judge(self.figure, self.spread, self.target, rounds=self.least_rounds)

    def cells(self) -> tuple[str, ...]:
        first, third = (self._figure(value) for value in self.figure.quartiles)
        low, high = (self._figure(value) for value in self.figure.interval)
        many = len(self.figure.values) > 1
        worst = "" if self.judged is None else f", worst {self._figure(self.judged)}"
        return (
            self.measure,
            self.ours.text(),
            self.theirs.text() if self.theirs else "–",
            self._figure(self.figure.median) + self._suffix() + worst,
            _range(first, third) if many else "–",
            f"{self.spread:.1%}" if many else "–",
            _range(low, high) if many else "–",
            self._target(),
            str(self.verdict),
        )

    def _figure(self, value: float) -> str:
        return f"{value:.{self.digits}f}"

    def _suffix(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def _target(self) -> str:
        if self.target is None:
            return "–"
        return f"{self.target.sign} {self.target.limit:g}{self._suffix()}"

    def document(self) -> dict[str, Any]:
        first, third = self.figure.quartiles
        return {
            "measure": self.measure,
            "ours": _side(self.ours),
            "theirs": _side(self.theirs) if self.theirs else None,
            "figure": self.figure.median,
            "unit": self.unit,
            "quartiles": [first, third],
            "interval": list(self.figure.interval),
            "spread": self.spread,
            "judged": self.judged,
            "target": asdict(self.target) if self.target else None,
            "verdict": self.verdict,
        }


def _range(low: str, high: str) -> str:
    return f"{low} to {high}" if low.startswith("-") else f"{low}–{high}"


def _side(side: Side) -> dict[str, Any]:
    first, third = side.sample.quartiles
    return {
        "name": side.name,
        "unit": side.unit,
        "median": side.sample.median,
        "quartiles": [first, third],
        "values": [round(value, 6) for value in side.sample.values],
    }


def ratio_row(measure: str, sides: tuple[Side, Side], target: Target | None) -> Row:
    """Ours divided by the other side's, round by round."""
    ours, theirs = sides
    figure = ratios(ours.sample.values, theirs.sample.values)
    return Row(
        measure=measure,
        ours=ours,
        theirs=theirs,
        figure=figure,
        unit="×",
        digits=3,
        target=target,
        least_rounds=LEAST_ROUNDS,
    )


def added_row(measure: str, sides: tuple[Side, Side], target: Target | None, *, digits: int = 2) -> Row:
    """What ours takes beyond the other side, round by round."""
    ours, theirs = sides
    return Row(
        measure=measure,
        ours=ours,
        theirs=theirs,
        figure=differences(ours.sample.values, theirs.sample.values),
        unit=ours.unit,
        digits=digits,
        scale=theirs.sample.median,
        least_rounds=LEAST_ROUNDS,
        target=target,
    )


def added_share_row(measure: str, sides: tuple[Side, Side], target: Target | None) -> Row:
    """The same as a share of the other side's, in per cent."""
    ours, theirs = sides
    figure = Sample.of(
        [100 * (ratio - 1) for ratio in ratios(ours.sample.values, theirs.sample.values).values]
    )
    return Row(
        measure=measure,
        ours=ours,
        theirs=theirs,
        figure=figure,
        unit="%",
        scale=100.0,
        least_rounds=LEAST_ROUNDS,
        target=target,
    )


def plain_row(
    measure: str, ours: Side, target: Target | None, *, theirs: Side | None = None, worst: bool = False
) -> Row:
    """Our own figure against a bound; the other side stands beside it to compare."""
    judged = max(ours.sample.values) if worst else None
    return Row(
        measure=measure,
        ours=ours,
        theirs=theirs,
        figure=ours.sample,
        unit=ours.unit,
        digits=ours.digits,
        target=target,
        judged=judged,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One bench, run once."""

    name: str
    title: str
    command: str
    facts: dict[str, str]
    """Commit, machine, engine, model: what the figures depend on."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    quick: bool = False
    against: bool = False
    """Whether it compares two commits."""

    @property
    def file_stem(self) -> str:
        # Apart: a quick run must not write over the figures of a long one, nor now/then over the usual ones.
        return self.name + (".against" if self.against else "") + (".quick" if self.quick else "")

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", f"`{self.command}`", ""]
        lines += table(("", ""), self.facts.items())
        lines += ["", *table(_HEAD, (row.cells() for row in self.rows))]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "quick": self.quick,
            "command": self.command,
            "facts": self.facts,
            "rows": [row.document() for row in self.rows],
            "notes": list(self.notes),
        }

    def write(self, folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.file_stem}.md").write_text(self.markdown(), encoding="utf-8")
        text = json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n"
        (folder / f"{self.file_stem}.json").write_text(text, encoding="utf-8")
