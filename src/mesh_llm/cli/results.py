"""How every measurement shows what it found: tables, or JSON, and files where a folder is named."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mesh_llm.cli.output import print_table
from mesh_llm.results import plots
from mesh_llm.results.document import Document, to_json
from mesh_llm.results.write import write

folder_option = click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="write JSON, Markdown, one HTML page and plots there",
)


def show(document: Document, *, folder: Path | None, as_json: bool) -> None:
    """Print `document`; with a folder also write it, and say where."""
    if as_json:
        print(to_json(document), end="")
    else:
        _print(document)
    if folder is None:
        return
    files = write(document, folder)
    page = next(file for file in files if file.suffix == ".html")
    print(f"Written: {page} and {len(files) - 1} files beside it", file=sys.stderr)
    if document.plots and not plots.available():
        print(plots.HOW_TO_GET, file=sys.stderr)


def _print(document: Document) -> None:
    print(document.title)
    for table in document.tables:
        print(f"\n{table.title}")
        print_table(table.rows, headers=table.columns)
        if table.note:
            print(table.note)
    if document.notes:
        print()
        for note in document.notes:
            print(f"- {note}")
    print()
    print_table(list(document.facts.items()))
