"""Who may take part, and in words why the others may not. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import HostingMode, ModelFacts, NodeId, Role

_SHOWN_DIGITS = 12
"""Of a fingerprint: enough to tell two apart."""


UNREACHABLE = "cannot be reached"
"""The last of the reasons: a plan that runs already does not depend on who can see whom just now."""


@frozen
class Eligible:
    """All members: those who can compute with this model, and the reasons of the rest."""

    able: tuple[Candidate, ...]
    refused: dict[NodeId, str]
    parts: frozenset[NodeId] = frozenset()
    """Of the able: those without the model's files, who fetch the layers that they are given."""

    @property
    def hosts(self) -> tuple[Candidate, ...]:
        return tuple(node for node in self.able if self.may_host(node))

    def may_host(self, node: Candidate) -> bool:
        """Whether it has all that a host reads, and wants to be one."""
        return node.facts.hosting is not HostingMode.NEVER and node.id not in self.parts

    def keeps(self, node: NodeId) -> bool:
        """Whether it may go on with what it does."""
        return self.refused.get(node, UNREACHABLE) == UNREACHABLE


def roster_of(
    snapshot: Snapshot, model: ModelFacts, settings: ModelSettings, barred: Mapping[NodeId, str]
) -> Eligible:
    reasons = {node.id: _refusal(node, model, settings, barred) for node in snapshot.nodes}
    return Eligible(
        able=tuple(node for node in snapshot.nodes if not reasons[node.id]),
        refused={id: reason for id, reason in reasons.items() if reason},
        parts=frozenset(node.id for node in snapshot.nodes if not _has_files(node, model)),
    )


def without_layers(snapshot: Snapshot, model: ModelFacts) -> dict[NodeId, str]:
    """Those who have yet to fetch everything that they would compute with: plans without them come first."""
    return {
        node.id: "has yet to fetch its layers"
        for node in snapshot.nodes
        if _may_fetch(node, model) and (part := node.facts.part_of(model.fingerprint)) and not part.spans
    }


def _refusal(
    node: Candidate, model: ModelFacts, settings: ModelSettings, barred: Mapping[NodeId, str]
) -> str:
    if not node.alive:
        return "lost"
    if node.facts.role is Role.CLIENT:
        return "is a client"
    if node.id in barred:
        return barred[node.id] or "failed a moment ago"
    if not node.facts.engine:
        return "has no engine"
    refusal = _model_refusal(node, model, settings) or _adapter_refusal(node, settings)
    return refusal or ("" if node.reachable else UNREACHABLE)


def _adapter_refusal(node: Candidate, settings: ModelSettings) -> str:
    held = {model.fingerprint for model in node.facts.models}
    for adapter in settings.adapters:
        if adapter.file.digest not in held:
            file = adapter.file.name
            return f"lacks the LoRA adapter {file}: copy {file}.gguf to its models folder, or let it fetch it"
    return ""


def _model_refusal(node: Candidate, model: ModelFacts, settings: ModelSettings) -> str:
    if _has_files(node, model) or _may_fetch(node, model):
        return ""
    names = {settings.model, model.name, *(file.name for file in model.files)}
    names |= {file.stem for file in model.files}
    for held in sorted(node.facts.models, key=lambda held: held.fingerprint):
        if held.name in names:
            return f"has another file of that name (fingerprint {held.fingerprint[:_SHOWN_DIGITS]})"
    return "no such model file"


def _has_files(node: Candidate, model: ModelFacts) -> bool:
    return any(held.fingerprint == model.fingerprint for held in node.facts.models)


def _may_fetch(node: Candidate, model: ModelFacts) -> bool:
    return node.facts.part_of(model.fingerprint) is not None and not _has_files(node, model)


def split_refusal(node: Candidate, host: Candidate) -> str:
    """Why an able node cannot compute together with a host; empty where it can."""
    if not node.facts.splits:
        return "runs an engine that its user built, which cannot be part of a split"
    if node.facts.engine != host.facts.engine:
        return f"runs mesh-llm engine {node.facts.engine}, the others {host.facts.engine}"
    return ""
