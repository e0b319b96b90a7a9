"""A result as files: JSON for programs, Markdown, one HTML page, and a picture for each plot."""

from __future__ import annotations

from pathlib import Path

from mesh_llm.errors import MeshError
from mesh_llm.results import plots
from mesh_llm.results.document import Document, from_json, to_json
from mesh_llm.results.markdown import markdown
from mesh_llm.results.page import page


def write(document: Document, folder: Path) -> list[Path]:
    """NAME.json, NAME.md, NAME.html and, with matplotlib, NAME-1.svg and NAME-1.png for the first plot."""
    drawn = list(enumerate(document.plots, 1)) if plots.available() else []
    names = [f"{document.name}-{number}" for number, _ in drawn]
    files: dict[str, bytes] = {
        f"{document.name}.json": to_json(document).encode(),
        f"{document.name}.md": markdown(document, [f"{name}.svg" for name in names]).encode(),
        f"{document.name}.html": page(
            document, [plots.svg(plot, number, inline=True) for number, plot in drawn]
        ).encode(),
    }
    for name, (number, plot) in zip(names, drawn, strict=True):
        files[f"{name}.svg"] = plots.svg(plot, number).encode()
        files[f"{name}.png"] = plots.png(plot, number)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise MeshError(f"the results could not be written to {folder}: {error.strerror}") from error
    return [folder / name for name in files]


def read(path: Path) -> Document:
    """The document in a file."""
    try:
        return from_json(path.read_text("utf-8"))
    except OSError as error:
        raise MeshError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MeshError(f"{path} is not a result of mesh-llm bench") from error
