"""What a check has found."""

from __future__ import annotations

from enum import StrEnum

from mesh_llm.frozen import frozen


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but less well than it could, or not in all cases."""
    BROKEN = "broken"
    """A node does not start, or does not do what it was asked for."""


@frozen
class Finding:
    level: Level
    what: str
    why: str = ""
    """It matters."""
    mend: str = ""
    """The command, where there is one."""
    check: str = ""
    """Filled in by `examine`."""


def ok(what: str) -> Finding:
    return Finding(level=Level.OK, what=what)


def warning(what: str, *, why: str, mend: str) -> Finding:
    return Finding(level=Level.WARNING, what=what, why=why, mend=mend)


def broken(what: str, *, why: str, mend: str) -> Finding:
    return Finding(level=Level.BROKEN, what=what, why=why, mend=mend)
