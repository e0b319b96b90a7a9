"""What becomes of models that give way to another one, as the mesh would plan them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.decide import decide
from mesh_llm.planning.making_room import Loaded, Room, make_room
from mesh_llm.planning.other_models import without
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Fingerprint, Mode, ModelFacts, NodeId, Plan

ANOTHER_REPLICA = "computes for another replica of the model"


@frozen
class GivingWay:
    snapshot: Snapshot
    """The mesh, without what models have of it."""
    beside: Mapping[Fingerprint, Sequence[Plan]]
    """By which models run now."""
    models: Sequence[ModelSettings]
    """In the order in which they are planned."""
    facts: Callable[[Fingerprint], ModelFacts | None]
    may_go: Callable[[ModelSettings], Sequence[Loaded]]
    """Models that have memory, and may have to go for another one."""
    barred: Mapping[NodeId, str]

    def settled(self, room: Room) -> Room:
        """`room`, with the plans of those that give way: one after the other, with what is left.

        One of them may take the place of another that is still less important.
        """
        goes = {each.fingerprint: each for each in room.goes}
        made = [room.plan]
        for model in self.models:
            each, facts = goes.get(model.fingerprint), self.facts(model.fingerprint)
            if each is None or not each.gives_way or facts is None:
                continue
            plan_without = partial(self._plan, model, facts, made, (), goes)
            if plan_without(()).mode is Mode.WAITING:
                others = [other for other in self.may_go(model) if other.fingerprint not in goes]
                goes |= {other.fingerprint: other for other in make_room(others, plan_without).goes}
            then: list[Plan] = []
            for _ in each.plans[: model.most_replicas]:
                plan = self._plan(model, facts, made, then, goes, ())
                then += [plan] if plan.mode is not Mode.WAITING else []
            goes[model.fingerprint] = replace(each, then=tuple(then))
            made += then
        return replace(room, goes=tuple(goes.values()))

    def _plan(
        self,
        model: ModelSettings,
        facts: ModelFacts,
        made: Sequence[Plan],
        replicas: Sequence[Plan],
        goes: Collection[Fingerprint],
        gone: Collection[Fingerprint],
    ) -> Plan:
        """Of one more replica, beside plans that were made anew and those of models that do not go."""
        stay = [plan for id, plans in self.beside.items() if id not in {*goes, *gone} for plan in plans]
        taken = [*made, *replicas, *stay]
        apart = {node: ANOTHER_REPLICA for plan in replicas for node in plan.nodes}
        snapshot = without(self.snapshot, taken, before=taken)
        return decide(snapshot, facts, model, current=None, barred={**self.barred, **apart})
