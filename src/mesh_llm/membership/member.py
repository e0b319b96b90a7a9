"""A member, as a view shows it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mesh_llm.frozen import frozen
from mesh_llm.types import NodeFacts, NodeId, ServingPlan


class Standing(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@frozen
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


def serving_among(members: Iterable[Member]) -> tuple[NodeId, ServingPlan] | None:
    """The published plan of the highest epoch among those who are here, and its host."""
    plans = [(m.id, m.facts.serving) for m in members if m.present and m.facts.serving is not None]
    return max(((node, plan) for node, plan in plans if plan), key=lambda p: (p[1].epoch, p[0]), default=None)
