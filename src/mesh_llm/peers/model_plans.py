"""The plans of each model: what is published of them, and what of the mesh the other models leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from mesh_llm.membership.member import Published
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.planning.giving_way import ANOTHER_REPLICA
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.planning.other_models import without
from mesh_llm.planning.replicas import first_unused, wanted_replicas
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
        served = [(plans, plans.published) for plans in self.models if plans.published is not None]
        first = [(plans.is_default, plan) for plans, plan in served if plan.replica == 0]
        settings = self.mesh.settings()
        several = settings is not None and sum(model.most_replicas for model in settings.models) > 1
        self.mesh.publish(
            serving=next((plan for is_default, plan in first if is_default), None),
            also_serving=tuple(plan for is_default, plan in first if not is_default),
            replicas=tuple(plan for _, plan in served if plan.replica),
            starting=tuple(plans.begun for plans in self.models if several and plans.begun is not None),
            crowded=tuple(plan.epoch for plans, plan in served if plans.is_crowded),
            failing=tuple(plans.fingerprint for plans in self.models if plans.fails and plans.fingerprint),
        )

    def decided(self, fingerprint: Fingerprint) -> Mapping[int, Plan]:
        """What this node would do with a model, as far as it knows that, by replica."""
        return next((plans.decided for plans in self.models if plans.fingerprint == fingerprint), {})


class ModelPlans:
    """Those of one model."""

    def __init__(self, hosted: HostedPlans, fingerprint: Fingerprint | None) -> None:
        self._hosted = hosted
        self._mesh = hosted.mesh
        self.fingerprint = fingerprint
        """None until the mesh has a model."""
        self.published: ServingPlan | None = None
        self.begun: ServingPlan | None = None
        self.decided: Mapping[int, Plan] = {}
        self.replica = 0
        """Which of the model's plans this node hosts, or would."""
        self.is_crowded = False
        """Requests wait for the engine here, or did until not long ago."""
        self.fails = False
        """It failed here again and again, and leaves the memory to those that gave way to it."""
        self.displaced: frozenset[Fingerprint] = frozenset()
        """Models that give way to it now."""
        hosted.models.append(self)

    @property
    def is_default(self) -> bool:
        settings = self._mesh.settings()
        return settings is None or self.fingerprint in (None, settings.fingerprint)

    def settings(self) -> ModelSettings | None:
        """How the model is served, as owners have set it."""
        settings = self._mesh.settings()
        return settings.of(self.fingerprint) if settings is not None and self.fingerprint else settings

    def serving(self) -> Published | None:
        """What the mesh serves the model with, whoever hosts it; the first, where it runs more than once."""
        return self._mesh.serving(self.fingerprint)

    def replicas(self) -> dict[int, Published]:
        """All plans that the mesh serves the model with."""
        return self._mesh.replicas(self.fingerprint)

    def wanted(self) -> int:
        """How often the model is to run."""
        settings = self.settings()
        if settings is None or settings.most_replicas == 1:
            return 1
        crowded = (self.is_crowded_at(*published) for published in self.replicas().values())
        return wanted_replicas(settings, sum(crowded))

    def numbers(self) -> list[int]:
        """Of the replicas that are to run: those that serve come first."""
        numbers = list(self.replicas())[: self.wanted()]
        while len(numbers) < self.wanted():
            numbers.append(first_unused(numbers))
        return numbers

    def rival(self) -> Published | None:
        """A plan of another node's that counts more than this node's own of the same number.

        Two may serve after a partition, even under one epoch: the higher one of epoch and id counts,
        everywhere. A better plan that nobody follows has to be proposed anew, above both.
        """
        published = self.replicas().get(self.replica)
        return published if published is not None and published[0] != self._mesh.me else None

    def other_number(self) -> int | None:
        """That this node's plan should have from now on.

        The first plan that is left is number 0, which older versions know. Of two with one number the lower
        one takes another, if it may stay.
        """
        served = self.replicas()
        unused, rival = first_unused(served), self.rival()
        is_first = rival is None and next(iter(served), None) == self.replica and unused == 0
        is_spare = rival is not None and len(served) < self.wanted()
        return unused if is_first or is_spare else None

    def is_crowded_at(self, host: NodeId, plan: ServingPlan) -> bool:
        """As its host says."""
        member = self._mesh.member(host)
        return member is not None and plan.epoch in member.facts.crowded

    def next_epoch(self) -> int:
        return self._hosted.next_epoch()

    def publish(self, serving: ServingPlan | None) -> None:
        self.published, self.begun = serving, self.begun if serving is None else None
        self._hosted.tell()

    def begin(self, starting: ServingPlan | None) -> None:
        """A plan that is being brought up, or none any more."""
        self.begun = starting
        self._hosted.tell()

    def crowd(self, is_crowded: bool) -> None:
        if is_crowded != self.is_crowded:
            self.is_crowded = is_crowded
            self._hosted.tell()

    def fail(self, fails: bool) -> None:
        if fails != self.fails:
            self.fails = fails
            self._hosted.tell()

    def decide(self, plans: Mapping[int, Plan]) -> None:
        """No plans: nothing is to be done with the model now."""
        before, self.decided = self.decided, plans
        if _keys(before) != _keys(plans):
            self._hosted.on_decided()

    def close(self) -> None:
        self._hosted.models.remove(self)
        self._hosted.tell()

    # -- beside other models -------------------------------------------------------------------

    def snapshot(
        self, replica: int, earlier: Mapping[int, Plan], gone: Collection[Fingerprint] = ()
    ) -> Snapshot:
        """The mesh, without what other models and other replicas of this one have of it.

        `earlier`: replicas that are about to run. Models that are `gone` count as if they had nothing.
        """
        found = self._others(replica, earlier)
        others = [(is_before, plan) for model, is_before, plan in found if model not in gone]
        taken = [plan for _, plan in others]
        before = [plan for is_before, plan in others if is_before]
        return without(self._mesh.snapshot(), taken, before=before)

    def elsewhere(self, replica: int, earlier: Mapping[int, Plan]) -> dict[NodeId, str]:
        """Nodes that compute for another replica of the model, each with the reason to leave it out."""
        served = {number: published[1].plan for number, published in self.replicas().items()}
        known = (served, self._begun(self.fingerprint), earlier)
        plans = [plan for found in known for number, plan in found.items() if number != replica]
        return {node: ANOTHER_REPLICA for plan in plans for node in plan.nodes}

    def gives_way_to(self) -> str:
        """The name of the model that this one makes room for now, or nothing."""
        for plans in self._hosted.models:
            settings = plans.settings() if plans.decided and self.fingerprint in plans.displaced else None
            if settings is not None:
                return settings.alias
        return ""

    def own_memory_bytes(self) -> int:
        """All that a plan of this model may take of this node."""
        return usable_bytes(self.own_facts())

    def own_facts(self) -> NodeFacts:
        """This node's, without what other models have of it."""
        own = self.snapshot(self.replica, self.decided).node(self._mesh.me)
        return own.facts if own is not None else self._mesh.facts

    def _others(self, replica: int, earlier: Mapping[int, Plan]) -> Iterator[tuple[Fingerprint, bool, Plan]]:
        """Plans of other models and replicas, and whether they come before this one.

        A second replica comes after the first ones of all models.
        """
        settings = self._mesh.settings()
        models = [model.fingerprint for model in settings.by_priority] if settings is not None else []
        own = replica, models.index(self.fingerprint) if self.fingerprint in models else 0
        for index, fingerprint in enumerate(models):
            decided = earlier if index == own[1] else self._hosted.decided(fingerprint)
            before = {number: plan for number, plan in decided.items() if (number, index) < own}
            for number, plan in self._plans_of(fingerprint, before):
                if (number, index) != own:
                    yield fingerprint, (number, index) < own, plan

    def _plans_of(self, fingerprint: Fingerprint, decided: Mapping[int, Plan]) -> Iterator[tuple[int, Plan]]:
        """What has memory: plans that serve, or are being brought up, or, before ours, are about to be."""
        served = self._mesh.replicas(fingerprint).items()
        found = {
            **decided,
            **self._begun(fingerprint),
            **{number: published[1].plan for number, published in served},
        }
        return ((number, plan) for number, plan in found.items() if plan.mode is not Mode.WAITING)

    def _begun(self, fingerprint: Fingerprint | None) -> dict[int, Plan]:
        begun: Iterable[ServingPlan] = (
            plan
            for member in self._mesh.alive()
            for plan in member.facts.starting
            if plan.fingerprint == fingerprint
        )
        return {each.replica: each.plan for each in sorted(begun, key=lambda each: each.epoch)}


def _keys(plans: Mapping[int, Plan]) -> list[tuple[int, object]]:
    return [(number, plan.key) for number, plan in plans.items()]
