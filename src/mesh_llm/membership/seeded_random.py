"""Chance that can be repeated: the same seed, the same throws."""

from __future__ import annotations

_MASK = (1 << 64) - 1


class SeededRandom:
    """Splitmix64: enough to keep a thousand nodes from dialling in step, and nothing more."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def fraction(self) -> float:
        """At least 0, less than 1."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
