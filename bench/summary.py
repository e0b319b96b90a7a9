"""The measured tables and pictures of README and docs/: chosen figures of bench/results.

`python -m bench.summary` writes them; tests/unit/test_docs.py fails where they are out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mesh_llm.results import markdown, plots
from mesh_llm.results.document import Document, Plot
from mesh_llm.results.write import read

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PLANNING = ROOT / "docs" / "design" / "planning.md"
RESULTS = Path(__file__).parent / "results"
PART = re.compile(
    r"(<!-- measured: python -m bench\.summary, (\w+) -->\n).*?(<!-- /measured -->\n)", re.DOTALL
)


def rows_of(result: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{result}.json").read_text("utf-8"))["rows"]
    return rows


def row_of(result: str, measure: str) -> dict[str, Any]:
    return next(row for row in rows_of(result) if row["measure"] == measure)


class Cell(NamedTuple):
    result: str
    measure: str
    side: str
    """`ours` or `theirs`: the median of that side; `figure`: what the bench makes of both."""

    def __str__(self) -> str:
        row = row_of(self.result, self.measure)
        if self.side == "figure":
            return f"{row['figure']:.2f} {row['unit']}"
        return f"{row[self.side]['median']:.3g} {row[self.side]['unit']}"


class GridCell(NamedTuple):
    """What the grid says of one side, in the column of that name."""

    nodes: str
    latency: str
    side: str
    column: str

    def __str__(self) -> str:
        spread = next(table for table in result("grid").tables if table.title == "Spread")
        row = next(row for row in spread.rows if row[:3] == (self.nodes, self.latency, self.side))
        unit = " tok/s" if self.column == "tok/s" else ""
        return row[spread.columns.index(self.column)] + unit


_OURS, _STOCK = "ours", "stock ggml-rpc"
_FAR = "decode, 5 workers, 10 ms, of stock"
_NEAR = "decode, 3 workers, no delay, of local"
_START = "start until ready, 3 workers, 50 ms"
_BYTES = "all bytes over links until ready"
_EDITED = "a program edited: text"
_ENDS = "it ends"
CHOSEN: tuple[tuple[str, Cell | GridCell, Cell | GridCell | str], ...] = (
    (
        "writing over 5 machines, 10 ms apart; processor with AMX",
        Cell("split", _FAR, "ours"),
        Cell("split", _FAR, "theirs"),
    ),
    (
        "the same; processor without AMX",
        GridCell("5", "10 ms", _OURS, "tok/s"),
        GridCell("5", "10 ms", _STOCK, "tok/s"),
    ),
    (
        "writing over 3 machines with no delay, of one machine's speed; with AMX",
        Cell("split", f"ours: {_NEAR}", "figure"),
        Cell("split", f"stock: {_NEAR}", "figure"),
    ),
    (
        "the same; without AMX",
        GridCell("3", "0 ms", _OURS, "of unsplit"),
        GridCell("3", "0 ms", _STOCK, "of unsplit"),
    ),
    (
        "start over 3 machines, 50 ms apart",
        Cell("split", f"ours: {_START}, weights resident, above local", "ours"),
        Cell("split", f"stock: {_START}, above local", "ours"),
    ),
    ("sent until ready (98 MB model)", Cell("split", _BYTES, "ours"), Cell("split", _BYTES, "theirs")),
    ("pause of an answer: a worker dies", Cell("resume", "pause, a worker is killed", "ours"), _ENDS),
    ("pause of an answer: its host dies", Cell("resume", "pause, the host is killed", "ours"), _ENDS),
    ("editing a program with drafts, of the speed without", Cell("speculation", _EDITED, "figure"), "–"),
)


def table() -> str:
    head = ["| | mesh-llm | stock llama.cpp RPC |", "| --- | ---: | ---: |"]
    rows = [f"| {what} | {ours} | {theirs} |" for what, ours, theirs in CHOSEN]
    return "\n".join([*head, *rows]) + "\n"


_DECODE, _FIRST = ": decode", ": first token"
_REPORTED = ("the demo, as it was reported: by Q4_K alone", "73.2", "21.8", "+236 %", "0.07", "0.68", "-90 %")


def predictions() -> str:
    """What was predicted beside what was measured, and how many predictions were near enough."""
    rows = rows_of("prediction")
    shares = [row for row in rows if row["unit"] == "%" and row["ours"]["unit"] == "%"]
    lines = [
        "- "
        + "; ".join([row["measure"], *(_share_of(row[side]) for side in ("ours", "theirs") if row[side])])
        for row in shares
    ]
    head = ("case", "tok/s predicted", "measured", "off by", "first token predicted, s", "measured", "off by")
    measures = {row["measure"]: row for row in rows}
    cases = [measure.removesuffix(_DECODE) for measure in measures if measure.endswith(_DECODE)]
    table = [
        (case, *_pair(measures[case + _DECODE], 1), *_pair(measures[case + _FIRST], 3)) for case in cases
    ]
    return "\n".join([*lines, "", *markdown.table(head, [*table, _REPORTED])]) + "\n"


def _share_of(side: dict[str, Any]) -> str:
    return f"{side['name']}: {side['median']:.0f} %"


def _pair(row: dict[str, Any], digits: int) -> tuple[str, str, str]:
    predicted, measured = (f"{row[side]['median']:.{digits}f}" for side in ("ours", "theirs"))
    return predicted, measured, f"{round(row['figure']):+d} %"


class Shown(NamedTuple):
    """What pages show of a result: tables by the beginnings of their titles, and plots by theirs."""

    tables: tuple[str, ...]
    plots: tuple[str, ...]


SHOWN: dict[str, Shown] = {
    "grid": Shown(tables=("Decode",), plots=("Decode",)),
    "transport": Shown(
        tables=("Round trip, ms", "Throughput", "What that means"), plots=("Round trip", "Throughput")
    ),
    "simulate": Shown(
        tables=("Until everybody knows", "Messages", "Plans of small meshes"),
        plots=("Planning time", "Until everybody knows", "Control traffic", "Waits"),
    ),
    "chaos": Shown(
        tables=("What has to hold", "Answers", "Where the time of pauses goes"), plots=("Pauses", "Memory")
    ),
}
"""Results that `mesh-llm bench` and `mesh-llm lab` wrote."""


def result(name: str) -> Document:
    return read(RESULTS / f"{name}.json")


def pictures() -> dict[Path, Plot]:
    """Of all those results, beside them."""
    return {
        RESULTS / f"{name}-{number}.svg": plot
        for name in SHOWN
        for number, plot in enumerate(result(name).plots, 1)
    }


def section(name: str) -> str:
    """What a page shows of one result."""
    found, shown = result(name), SHOWN[name]
    lines = [f"`{found.command}`", ""]
    for each in found.tables:
        if each.title.startswith(shown.tables):
            lines += [f"{each.title}:", "", *markdown.table(each.columns, each.rows), ""]
            lines += [each.note, ""] if each.note else []
    for number, plot in enumerate(found.plots, 1):
        if plot.title.startswith(shown.plots):
            lines.append(f"![{plot.title}](../bench/results/{name}-{number}.svg)")
    lines += ["", *(f"- {fact}: {value}" for fact, value in found.facts.items())]
    lines += [f"- {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "overview": table,
    "prediction": predictions,
    **{name: partial(section, name) for name in SHOWN},
}
PAGES = (README, BENCHMARKS, PLANNING)


def page(path: Path) -> str:
    """As it has to be."""
    return PART.sub(
        lambda found: found[1] + PARTS[found[2]]() + found[3],
        path.read_text("utf-8"),
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
    for path, plot in pictures().items():
        if plots.digest(plot) not in (path.read_text("utf-8") if path.is_file() else ""):
            number = int(path.stem.rpartition("-")[2])
            path.write_text(plots.svg(plot, number), "utf-8")
