"""A member, as a view shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mesh_llm.types import NodeFacts, NodeId


class Standing(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    id: NodeId
    standing: Standing
    incarnation: int
    facts: NodeFacts
    rtt_s: float | None
    """Of the connection; None while there is none, and for its first pings."""
    connected: bool
    via: tuple[NodeId, ...]
    """Where there is no connection: the connected members that hear it, by id."""
    since: float
    """When its standing changed last."""

    @property
    def present(self) -> bool:
        return self.standing in (Standing.ALIVE, Standing.SUSPECT)
