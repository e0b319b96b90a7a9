"""A member, as a view shows it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.types import Fingerprint, NodeFacts, NodeId, Role, ServingPlan


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


def called(name: str, members: Iterable[Member], *, nodes_first: bool = False) -> list[Member]:
    """Whom somebody means: the one of that id, or else all of that name, which may be another one's id.

    `nodes_first`: lite clients only where no node has the name.
    """
    found = list(members)
    named = [m for m in found if m.id == name] or [m for m in found if m.facts.name == name]
    nodes = [m for m in named if m.facts.role is not Role.CLIENT] if nodes_first else []
    return nodes or named


Published = tuple[NodeId, ServingPlan]
"""A plan, and its host."""


def serving_among(
    members: Iterable[Member], settings: MeshSettings | None, fingerprint: Fingerprint | None = None
) -> dict[int, Published]:
    """The published plans of a model among those who are here, by which of its replicas they are.

    Of the model of that fingerprint; without one, of the default model. While that is loaded for the first
    time, this is the one that was the default before it. Of two plans for one replica the one of the
    higher epoch counts.
    """
    wanted = fingerprint or (settings.fingerprint if settings is not None else "")
    is_default = settings is None or wanted == settings.fingerprint
    others = {model.fingerprint for model in settings.others} if settings is not None else ()
    found = [
        (member.id, plan)
        for member in members
        if member.present
        for plan in member.facts.served
        if plan.fingerprint == wanted
        or (is_default and plan is member.facts.serving and plan.fingerprint not in others)
    ]
    asked_for = [each for each in found if each[1].fingerprint in (wanted, "")] or found
    asked_for.sort(key=lambda each: (each[1].epoch, each[0]))
    plans = {plan.replica: (node, plan) for node, plan in asked_for}
    return dict(sorted(plans.items()))
