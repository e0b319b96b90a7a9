"""The plans of each model: what is published of them, and what of the mesh the other models leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.planning.other_models import without
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Fingerprint, Mode, NodeFacts, NodeId, Plan, ServingPlan


class HostedPlans:
    """What this node publishes of the plans that it hosts: the default model's apart from others'."""

    def __init__(self, mesh: Mesh, on_decided: Callable[[], None]) -> None:
        """`on_decided`: one model's plan has changed, and with it what there is for others."""
        self.mesh = mesh
        self.on_decided = on_decided
        self.models: list[ModelPlans] = []
        self._last_epoch = 0

    def next_epoch(self) -> int:
        """Above every one that was published, and every one that this node tried: leases go by it."""
        self._last_epoch = max(self.mesh.highest_epoch(), self._last_epoch) + 1
        return self._last_epoch

    def tell(self) -> None:
        own = [(plans.is_default, plans.published) for plans in self.models if plans.published is not None]
        settings = self.mesh.settings()
        several = settings is not None and bool(settings.others)
        self.mesh.publish(
            serving=next((plan for is_default, plan in own if is_default), None),
            also_serving=tuple(plan for is_default, plan in own if not is_default and plan is not None),
            starting=tuple(plans.begun for plans in self.models if several and plans.begun is not None),
        )

    def decided(self, fingerprint: Fingerprint) -> Plan | None:
        """What this node would do with a model, as far as it knows that."""
        found = next((plans.decided for plans in self.models if plans.fingerprint == fingerprint), None)
        return found if found is not None and found.mode is not Mode.WAITING else None


class ModelPlans:
    """Those of one model."""

    def __init__(self, hosted: HostedPlans, fingerprint: Fingerprint | None) -> None:
        self._hosted = hosted
        self._mesh = hosted.mesh
        self.fingerprint = fingerprint
        """None until the mesh has a model."""
        self.published: ServingPlan | None = None
        self.begun: ServingPlan | None = None
        self.decided: Plan | None = None
        hosted.models.append(self)

    @property
    def is_default(self) -> bool:
        settings = self._mesh.settings()
        return settings is None or self.fingerprint in (None, settings.fingerprint)

    def settings(self) -> ModelSettings | None:
        """How the model is served, as owners have set it."""
        settings = self._mesh.settings()
        return settings.of(self.fingerprint) if settings is not None and self.fingerprint else settings

    def serving(self) -> tuple[NodeId, ServingPlan] | None:
        """What the mesh serves the model with, whoever hosts it."""
        return self._mesh.serving(self.fingerprint)

    def next_epoch(self) -> int:
        return self._hosted.next_epoch()

    def publish(self, serving: ServingPlan | None) -> None:
        self.published, self.begun = serving, self.begun if serving is None else None
        self._hosted.tell()

    def begin(self, starting: ServingPlan | None) -> None:
        """A plan that is being brought up, or none any more."""
        self.begun = starting
        self._hosted.tell()

    def rest(self) -> None:
        """Nothing is to be done with the model now."""
        if self.decided is not None:
            self.decided = None
            self._hosted.on_decided()

    def decide(self, plan: Plan) -> None:
        before, self.decided = self.decided, plan
        if before is None or before.key != plan.key:
            self._hosted.on_decided()

    def close(self) -> None:
        self._hosted.models.remove(self)
        self._hosted.tell()

    # -- beside other models -------------------------------------------------------------------

    def snapshot(self, gone: Collection[Fingerprint] = ()) -> Snapshot:
        """The mesh, without what other models have of it; as if those that are `gone` had nothing."""
        others = [(is_before, plan) for model, is_before, plan in self._others() if model not in gone]
        taken = [plan for _, plan in others]
        before = [plan for is_before, plan in others if is_before]
        return without(self._mesh.snapshot(), taken, before=before)

    def own_memory_bytes(self) -> int:
        """All that a plan of this model may take of this node."""
        return usable_bytes(self.own_facts())

    def own_facts(self) -> NodeFacts:
        """This node's, without what other models have of it."""
        own = self.snapshot().node(self._mesh.me)
        return own.facts if own is not None else self._mesh.facts

    def _others(self) -> Iterator[tuple[Fingerprint, bool, Plan]]:
        """Other models, whether each comes before this one, and their plans."""
        settings = self._mesh.settings()
        is_before = True
        for model in settings.models if settings is not None else ():
            if model.fingerprint == self.fingerprint:
                is_before = False
            elif (plan := self._plan_of(model.fingerprint, is_before=is_before)) is not None:
                yield model.fingerprint, is_before, plan

    def _plan_of(self, fingerprint: Fingerprint, *, is_before: bool) -> Plan | None:
        """What has memory: the plan that serves, or is being brought up, or, before ours, is about to be."""
        published = self._mesh.serving(fingerprint)
        if published is not None:
            return published[1].plan
        begun = [
            plan
            for member in self._mesh.alive()
            for plan in member.facts.starting
            if plan.fingerprint == fingerprint
        ]
        if begun:
            return max(begun, key=lambda each: each.epoch).plan
        return self._hosted.decided(fingerprint) if is_before else None
