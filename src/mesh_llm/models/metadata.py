"""Checked reading of a GGUF's metadata: the file is anybody's, so every value is suspect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mesh_llm.errors import ModelError

_LARGEST = 1 << 24
"""No size in a model's metadata is larger, apart from its context; what is has been made to overflow."""


class Metadata:
    """The metadata of one file, with the architecture's prefix added to every key."""

    def __init__(self, *, file: str, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self.architecture = architecture
        self._metadata = metadata

    def damaged(self, what: str) -> NoReturn:
        raise damaged(self.file, what)

    def has(self, key: str) -> bool:
        return self._full(key) in self._metadata

    def number(
        self, key: str, *, default: int | None = None, minimum: int = 0, maximum: int = _LARGEST
    ) -> int:
        """A whole number within bounds; without a default it has to be there."""
        if not self.has(key):
            if default is None:
                self.damaged(f"it does not say its {self._full(key)}")
            return default
        return self._checked(key, self._metadata[self._full(key)], minimum, maximum)

    def per_layer(self, key: str, layers: int, *, default: int | None = None) -> tuple[int, ...]:
        """One number for all layers, or an array with one for each."""
        value = self._metadata.get(self._full(key))
        if not isinstance(value, list):
            return (self.number(key, default=default),) * layers
        if len(value) < layers:
            self.damaged(f"its {self._full(key)} has {len(value)} entries for {layers} layers")
        return tuple(self._checked(key, item, 0, _LARGEST) for item in value[:layers])

    def numbers(self, key: str, *, maximum: int = _LARGEST) -> tuple[int, ...]:
        """An array; empty where there is none."""
        value = self._metadata.get(self._full(key))
        if not isinstance(value, list):
            return ()
        return tuple(self._checked(key, item, 0, maximum) for item in value)

    def flags(self, key: str, layers: int) -> tuple[bool, ...] | None:
        """An array of yes and no, false where it is too short; None where there is no array."""
        value = self._metadata.get(self._full(key))
        if not isinstance(value, list):
            return None
        flags = [
            item if isinstance(item, bool) else self._checked(key, item, 0, 1) == 1 for item in value[:layers]
        ]
        return tuple(flags + [False] * (layers - len(flags)))

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(self._full(key), default)
        if not isinstance(value, bool):
            self.damaged(f"its {self._full(key)} is {_shown(value)}, but should be true or false")
        return value

    def _checked(self, key: str, value: Any, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.damaged(
                f"its {self._full(key)} is {_shown(value)}, "
                f"but should be a whole number from {minimum} to {maximum}"
            )
        return value

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def damaged(file: str, what: str) -> ModelError:
    return ModelError(
        f"{file} is damaged or not a language model: {what}",
        hint="download it again, or choose another file",
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
