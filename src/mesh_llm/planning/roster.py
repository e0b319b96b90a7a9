"""Who may take part, and in words why the others may not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Hosting, MeshSettings, ModelFacts, NodeId, Role

_SHOWN_DIGITS = 12
"""Of a fingerprint: enough to tell two apart."""


UNREACHABLE = "cannot be reached"
"""The last of the reasons: a plan that runs already does not depend on who can see whom just now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All members: those who can compute with this model, and the reasons of the rest."""

    able: tuple[Candidate, ...]
    refused: dict[NodeId, str]

    @property
    def hosts(self) -> tuple[Candidate, ...]:
        return tuple(node for node in self.able if node.facts.hosting is not Hosting.NEVER)

    def keeps(self, node: NodeId) -> bool:
        """Whether it may go on with what it does."""
        return self.refused.get(node, UNREACHABLE) == UNREACHABLE


def roster_of(
    snapshot: Snapshot, model: ModelFacts, settings: MeshSettings, barred: Mapping[NodeId, str]
) -> Roster:
    reasons = {node.id: _refusal(node, model, settings, barred) for node in snapshot.nodes}
    return Roster(
        able=tuple(node for node in snapshot.nodes if not reasons[node.id]),
        refused={id: reason for id, reason in reasons.items() if reason},
    )


def _refusal(node: Candidate, model: ModelFacts, settings: MeshSettings, barred: Mapping[NodeId, str]) -> str:
    if not node.alive:
        return "lost"
    if node.facts.role is not Role.NODE:
        return "is a client"
    if node.id in barred:
        return barred[node.id] or "failed a moment ago"
    if not node.facts.engine:
        return "has no engine"
    return _model_refusal(node, model, settings) or ("" if node.reachable else UNREACHABLE)


def _model_refusal(node: Candidate, model: ModelFacts, settings: MeshSettings) -> str:
    if any(held.fingerprint == model.fingerprint for held in node.facts.models):
        return ""
    names = {settings.model, model.name, *(file.name for file in model.files)}
    names |= {file.stem for file in model.files}
    for held in sorted(node.facts.models, key=lambda held: held.fingerprint):
        if held.name in names:
            return f"has another file of that name (fingerprint {held.fingerprint[:_SHOWN_DIGITS]})"
    return "no such model file"


def split_refusal(node: Candidate, host: Candidate) -> str:
    """Why an able node cannot compute together with a host; empty where it can."""
    if not node.facts.splits:
        return "runs an engine that its user built, which cannot be part of a split"
    if node.facts.engine != host.facts.engine:
        return f"runs mesh-llm engine {node.facts.engine}, the others {host.facts.engine}"
    return ""
