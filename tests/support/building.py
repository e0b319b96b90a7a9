"""What tests of builds share."""

from __future__ import annotations

from pathlib import Path

from mesh_llm.types import Progress


def ignore(step: Progress) -> None:
    """For whoever does not want to hear how far a build is."""


def leftovers(cache: Path) -> list[Path]:
    """Of builds that did not end as they should."""
    return [path for path in cache.glob("native/*/*") if path.name.startswith("building-")]
