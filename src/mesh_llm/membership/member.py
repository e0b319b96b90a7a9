"""A member, as a view shows it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.types import Fingerprint, NodeFacts, NodeId, ServingPlan


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


def serving_among(
    members: Iterable[Member], settings: MeshSettings | None, fingerprint: Fingerprint | None = None
) -> tuple[NodeId, ServingPlan] | None:
    """The published plan of the highest epoch among those who are here, and its host.

    Of the model of that fingerprint; without one, of the default model. While that is loaded for the first
    time, this is the one that was the default before it.
    """
    wanted = fingerprint or (settings.fingerprint if settings is not None else "")
    is_default = settings is None or wanted == settings.fingerprint
    others = {model.fingerprint for model in settings.others} if settings is not None else ()
    found = [
        (plan.fingerprint in (wanted, ""), plan.epoch, member.id, plan)
        for member in members
        if member.present
        for plan in member.facts.served
        if plan.fingerprint == wanted
        or (is_default and plan is member.facts.serving and plan.fingerprint not in others)
    ]
    _, _, node, plan = max(found, key=lambda each: each[:3], default=(False, 0, None, None))
    return (node, plan) if node is not None and plan is not None else None
