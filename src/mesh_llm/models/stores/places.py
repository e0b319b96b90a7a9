"""Where each store lies: as its own program would find it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mesh_llm.frozen import frozen
from mesh_llm.home import models_folder

_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Of the account that Ollama's installer makes for its service."""
_POINTER_BYTES = 4096


@frozen
class Places:
    """Folders that need not be there."""

    models: Path
    hub: Path
    lmstudio: tuple[Path, ...]
    ollama: tuple[Path, ...]

    @classmethod
    def from_environment(cls) -> Places:
        home, environ = Path.home(), os.environ
        return cls(
            models=models_folder(),
            hub=_hub(environ, home),
            lmstudio=_lmstudio(home),
            ollama=_ollama(environ, home),
        )


def _hub(environ: Mapping[str, str], home: Path) -> Path:
    """In the order in which huggingface_hub looks."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := environ.get(name):
            return _path(named)
    if named := environ.get("HF_HOME"):
        return _path(named) / "hub"
    base = environ.get("XDG_CACHE_HOME")
    return (_path(base) if base else home / ".cache") / "huggingface" / "hub"


def _lmstudio(home: Path) -> tuple[Path, ...]:
    """Where it is moved to, the folder of today, and that of earlier versions."""
    usual = (home / ".lmstudio", home / ".cache" / "lm-studio")
    moved = _pointed(home / ".lmstudio-home-pointer")
    return tuple(dict.fromkeys(place / "models" for place in ((moved, *usual) if moved else usual)))


def _pointed(pointer: Path) -> Path | None:
    """The folder that a file of one line names."""
    with suppress(OSError, ValueError):
        if pointer.is_file():
            with pointer.open("rb") as file:
                named = os.fsdecode(file.read(_POINTER_BYTES).strip())
            return Path(named) if named.startswith("/") and "\0" not in named else None
    return None


def _ollama(environ: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    named = environ.get("OLLAMA_MODELS")
    return (_path(named) if named else home / ".ollama" / "models", _OLLAMA_SERVICE)


def _path(text: str) -> Path:
    path = Path(text)
    with suppress(RuntimeError):  # ~NAME, and nobody is called so
        path = path.expanduser()
    return path
