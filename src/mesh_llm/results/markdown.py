"""A result as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mesh_llm.results.document import Document, ResultTable


def markdown(document: Document, pictures: Sequence[str] = ()) -> str:
    """`pictures` are file names, one for each plot."""
    lines = [f"# {document.title}", "", f"`{document.command}`", "", *table(("", ""), document.facts.items())]
    for each in document.tables:
        lines += ["", *result_table(each)]
    for plot, name in zip(document.plots, pictures, strict=False):
        lines += ["", f"![{plot.title}]({name})"]
    if document.notes:
        lines += ["", *(f"- {note}" for note in document.notes)]
    return "\n".join(lines) + "\n"


def result_table(of: ResultTable) -> list[str]:
    return [f"## {of.title}", "", *table(of.columns, of.rows), *(["", of.note] if of.note else [])]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; a bar inside a cell would end it."""
    lines = [_line(head), _line(["---"] * len(head))]
    return lines + [_line([cell.replace("|", "\\|") for cell in row]) for row in rows]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
