"""The measured tables and pictures of README and docs/: chosen figures of bench/results.

`python -m bench.summary` writes them; tests/unit/test_docs.py fails where they are out of date.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mesh_llm.results import markdown, plots
from mesh_llm.results.document import Document, Plot
from mesh_llm.results.write import read

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: python -m bench.summary -->\n", "<!-- /measured -->\n"


def row_of(result: str, measure: str) -> dict[str, Any]:
    document = json.loads((RESULTS / f"{result}.json").read_text("utf-8"))
    row: dict[str, Any] = next(row for row in document["rows"] if row["measure"] == measure)
    return row


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


_FAR = "decode, 5 workers, 10 ms, of stock"
_NEAR = "decode, 3 workers, no delay, of local"
_START = "start until ready, 3 workers, 50 ms"
_BYTES = "all bytes over links until ready"
_EDITED = "a program edited: text"
_ENDS = "it ends"
CHOSEN: tuple[tuple[str, Cell, Cell | str], ...] = (
    ("writing over 5 machines, 10 ms apart", Cell("split", _FAR, "ours"), Cell("split", _FAR, "theirs")),
    (
        "writing over 3 machines, of one machine's speed",
        Cell("split", f"ours: {_NEAR}", "figure"),
        Cell("split", f"stock: {_NEAR}", "figure"),
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


def grid() -> Document:
    return read(RESULTS / "grid.json")


def pictures() -> dict[Path, Plot]:
    """Of the grid, beside it."""
    return {RESULTS / f"grid-{number}.svg": plot for number, plot in enumerate(grid().plots, 1)}


def benchmarks() -> str:
    """What docs/benchmarks.md shows."""
    found = grid()
    lines = [f"`{found.command}`", "", *markdown.table(found.tables[0].columns, found.tables[0].rows), ""]
    speeds = {path: plot for path, plot in pictures().items() if plot.y_label == "tok/s"}
    lines += [f"![{plot.title}](../bench/results/{path.name})" for path, plot in speeds.items()]
    shown = ("date", "hardware", "engine", "model", "load average", "took")
    lines += ["", *(f"- {name}: {found.facts[name]}" for name in shown if name in found.facts)]
    lines += [f"- {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


PAGES: dict[Path, Callable[[], str]] = {README: table, BENCHMARKS: benchmarks}


def page(path: Path) -> str:
    """As it has to be."""
    before, rest = path.read_text("utf-8").split(BEGIN)
    return before + BEGIN + PAGES[path]() + END + rest.split(END)[1]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
    for number, (path, plot) in enumerate(pictures().items(), 1):
        if plots.digest(plot) not in (path.read_text("utf-8") if path.is_file() else ""):
            path.write_text(plots.svg(plot, number), "utf-8")
