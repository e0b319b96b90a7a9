"""The kind of plan that was not chosen, for people who compare. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.decide import decide, decide_alone
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Mode, ModelFacts, NodeId, Plan


@frozen
class Alternative:
    """Solo where the plan is split, split where it is solo."""

    mode: Mode
    plan: Plan | None
    reason: str
    """Of the plan, or why there is none."""


def alternative(
    snapshot: Snapshot,
    model: ModelFacts,
    settings: ModelSettings,
    chosen: Plan,
    *,
    barred: Mapping[NodeId, str],
) -> Alternative | None:
    """None while nothing can be planned at all."""
    if chosen.mode is Mode.WAITING:
        return None
    wanted = Mode.SPLIT if chosen.mode is Mode.SOLO else Mode.SOLO
    free = replace(settings, split=wanted is Mode.SPLIT, tensor_split=None, layers=None)
    other = decide(snapshot, model, free, current=None, barred=barred)
    if wanted is Mode.SOLO and other.mode is Mode.SPLIT:
        # It may fit on one, and be slower there.
        alone = decide_alone(snapshot, model, free, barred=barred)
        other = alone if alone.mode is wanted else other
    return Alternative(mode=wanted, plan=other if other.mode is wanted else None, reason=other.reason)
