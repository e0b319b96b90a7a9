"""Whether a model would fit, as if every node had its file: what a listing says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import smallest_context
from mesh_llm.planning.proposal import useful_context
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Fingerprint, HeldModel, Mode, ModelFacts, Plan, Role


@frozen
class WouldFit:
    fits: bool
    context: int
    """Tokens per slot that were asked for: it may be served with more, and never with fewer."""
    need_bytes: int
    """With that context."""
    have_bytes: int
    nodes: int
    """That would compute; 0 where it does not fit."""
    reason: str


def supposed(nodes: Iterable[Candidate], fingerprint: Fingerprint) -> Snapshot:
    """The same nodes, each with a model of that fingerprint."""
    held = HeldModel(fingerprint=fingerprint, name="", size_bytes=0)
    return Snapshot(
        nodes=tuple(
            replace(node, facts=replace(node.facts, models=(held,), part=None))
            for node in nodes
            if node.alive and node.facts.role is not Role.CLIENT
        )
    )


def outlook(snapshot: Snapshot, model: ModelFacts, *, slots: int) -> WouldFit:
    """What would be decided, with as much context as a conversation needs; or else with the least."""
    enough, least = useful_context(model), smallest_context(model)
    first = _with_context(snapshot, model, enough, slots)
    return first if first.fits or enough == least else _with_context(snapshot, model, least, slots)


def whole_plan(snapshot: Snapshot, model: ModelFacts, *, slots: int) -> Plan:
    """What would be decided with as much context as fits."""
    return decide(snapshot, model, _settings(model, None, slots), current=None)


def _with_context(snapshot: Snapshot, model: ModelFacts, context: int, slots: int) -> WouldFit:
    plan = decide(snapshot, model, _settings(model, context, slots), current=None)
    return WouldFit(
        fits=plan.mode is not Mode.WAITING,
        context=context,
        need_bytes=plan.need_bytes,
        have_bytes=plan.have_bytes,
        nodes=len({stage.node for stage in plan.stages}),
        reason=plan.reason,
    )


def _settings(model: ModelFacts, context: int | None, slots: int) -> MeshSettings:
    return MeshSettings(
        version=1,
        model=model.name,
        fingerprint=model.fingerprint,
        alias=model.name,
        context=context,
        slots=slots,
    )
