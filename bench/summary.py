"""The table of the README: chosen figures of bench/results, beside what they are compared with.

`python -m bench.summary` writes it; tests/unit/test_docs.py fails where it is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: python -m bench.summary -->\n", "<!-- /measured -->\n"


class Cell(NamedTuple):
    result: str
    measure: str
    side: str
    """`ours` or `theirs`: the median of that side; `figure`: what the bench makes of both."""

    def __str__(self) -> str:
        document = json.loads((RESULTS / f"{self.result}.json").read_text("utf-8"))
        row: dict[str, Any] = next(row for row in document["rows"] if row["measure"] == self.measure)
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


def page(text: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(page(README.read_text("utf-8")), "utf-8")
