"""A model on this disk, as its store has it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from mesh_llm.frozen import frozen

OLLAMA_PREFIX = "ollama:"


class Store(StrEnum):
    """Whose folder it is. A file that lies in several belongs to the first of these."""

    MODELS = "models"
    HUB = "huggingface"
    LMSTUDIO = "lmstudio"
    OLLAMA = "ollama"


def title(name: str) -> str:
    """Without what goes without saying."""
    return name.removeprefix(OLLAMA_PREFIX).removesuffix(":latest")


@frozen
class LocalModel:
    name: str
    """The file's, without .gguf and the number of its shard; of Ollama's `ollama:NAME:TAG`. Printable."""
    path: Path
    """What to give to the engine: the first of its files that is here. An Ollama blob has no .gguf."""
    files: tuple[Path, ...]
    """In the order of their shards."""
    size_bytes: int
    """Of the files that are here."""
    store: Store
    repo: str = ""
    """`owner/name` where the store tells it: that of the hub, or of LM Studio."""
    also: tuple[str, ...] = ()
    """Further names of the very same files: another tag, a link in another store."""
    missing: tuple[str, ...] = ()
    """Names of shards that should be beside it and are not."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that it goes by here; any of them means this file."""
        return (self.name, *self.also)

    @property
    def title(self) -> str:
        """For people, and as the name under which it is served: `qwen3:30b`, not `sha256-…`."""
        return title(self.name)


@frozen
class Skipped:
    """Something that looked like a model."""

    path: Path
    store: Store
    reason: str


@frozen
class Found:
    models: tuple[LocalModel, ...]
    skipped: tuple[Skipped, ...]
