"""What should run of one model, as this node sees it: a plan for each of its replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mesh_llm.host.plan_run import PlanRun
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import ModelDemand
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.planning.decide import decide
from mesh_llm.planning.eligibility import without_layers
from mesh_llm.planning.making_room import move
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Fingerprint, Mode, ModelFacts, NodeId, Plan, ServingPlan, State


class Decisions:
    def __init__(self, mesh: Mesh, plans: ModelPlans, demand: ModelDemand) -> None:
        self._mesh = mesh
        self._demand = demand
        self._plans = plans
        self._instead_of: ServingPlan | None = None
        """What served when the one that starts was begun."""
        self._was_served = False
        """By whomever: somebody may wait for the next engine."""

    def begin(self) -> None:
        """A plan is about to be brought up here."""
        published = self._plans.replicas().get(self._plans.replica)
        self._instead_of = published[1] if published is not None else None

    def made(
        self,
        model: ModelFacts,
        settings: ModelSettings,
        failed: Mapping[NodeId, str],
        *,
        serving: PlanRun | None,
        starting: PlanRun | None,
        lanes: int = 1,
    ) -> dict[int, Plan]:
        """The plans that should run, by number: of those that serve first, then of those that are to.

        `serving` and `starting` are this node's; `lanes` are what its requests ask for.
        """
        plans: dict[int, Plan] = {}
        for number in self._plans.numbers():
            own = (serving, starting) if number == self._plans.replica else (None, None)
            snapshot = self._plans.snapshot(number, plans)
            barred = {**failed, **self._mesh.unready(), **self._plans.elsewhere(number, plans)}
            current = self._current(settings, number, own[0])
            first = next(iter(plans.values()), None)
            wish = settings
            if first is not None and first.mode is not Mode.WAITING and settings.context is None:
                # Whichever answers, as much text fits.
                wish = replace(settings, context=(current.plan if current is not None else first).context)
            # Whoever hosts knows what is asked for; others see what came of it.
            seen = current.plan.lanes if current is not None else 1
            count = seen if own[0] is None else lanes
            plan = self._one(snapshot, model, wish, barred, current, own[1], count)
            plans[number] = self._with_move(plan, current, self._plans.decided.get(number))
        return plans

    def with_room(
        self,
        plans: Mapping[int, Plan],
        model: ModelFacts,
        settings: ModelSettings,
        failed: Mapping[NodeId, str],
    ) -> tuple[dict[int, Plan], dict[int, Plan]]:
        """The same plans, where the first of them waits with what it waits for; and what others plan beside.

        Other models make room for the first plan alone. Those that give way see it as if it ran: they end, or
        move, and do not come back while it is brought up.
        """
        first = next(iter(plans))

        def without(gone: Collection[Fingerprint]) -> Plan:
            snapshot = self._plans.snapshot(first, {}, gone)
            return decide(snapshot, model, settings, current=None, barred={**failed, **self._mesh.unready()})

        room = self._demand.room_for(plans[first], without)
        goes = room.goes if room is not None else ()
        self._plans.displaced = frozenset(each.fingerprint for each in goes if each.gives_way)
        if room is None:
            return {**plans}, {**plans}
        own = {**plans, first: room.told(plans[first], self._mesh.name_of)}
        return own, {**own, first: room.plan} if room.takes_over else own

    def own_part(self, plans: Mapping[int, Plan], *, is_free: bool) -> Plan:
        """The plan that this node hosts or is to host; else the first. `is_free`: it has no engine yet."""
        if is_free:
            own = (number for number, plan in plans.items() if plan.host == self._mesh.me)
            self._plans.replica = next(own, next(iter(plans)))
        return plans.get(self._plans.replica, next(iter(plans.values())))

    def _one(
        self,
        snapshot: Snapshot,
        model: ModelFacts,
        settings: ModelSettings,
        barred: Mapping[NodeId, str],
        current: ServingPlan | None,
        starting: PlanRun | None,
        lanes: int,
    ) -> Plan:
        self._was_served = self._was_served or current is not None
        if (
            starting is not None
            and starting.settings.plan_version == settings.plan_version
            and not self._is_outdone()
        ):
            # Given up for the reasons for which one that serves is: delays stray, most of all at first.
            begun = ServingPlan(
                epoch=starting.epoch, plan=starting.plan, settings_version=starting.settings.plan_version
            )
            # While answers wait, what serves soon comes first. What is better is brought up beside it.
            soon = not without_layers(snapshot, model).keys() & {stage.node for stage in begun.plan.stages}
            urgent = self._was_served and soon and not _lasts(current, barred)
            lent = {stage.node for stage in begun.plan.workers} & self._leaving() if urgent else set()
            plan = decide(
                snapshot,
                model,
                settings,
                current=begun,
                barred={node: why for node, why in barred.items() if node not in lent},
                beatable=not urgent,
                lanes=begun.plan.lanes,
            )
            if plan.key == starting.plan.key:
                return plan
        if current is None and (lacking := without_layers(snapshot, model)):
            # While nothing serves, what can do so at once comes before what is better after a long fetch.
            plan = decide(snapshot, model, settings, current=None, barred={**lacking, **barred})
            if plan.mode is not Mode.WAITING:
                return plan
        return decide(snapshot, model, settings, current=current, barred=barred, lanes=lanes)

    def _with_move(self, plan: Plan, current: ServingPlan | None, last: Plan | None) -> Plan:
        """With what it says of the plan whose place it takes, for as long as it is the plan."""
        running = current.plan if current is not None else None
        same = next((each for each in (running, last) if each is not None and each.key == plan.key), None)
        if same is not None:
            return replace(plan, moved=same.moved)
        if running is None or plan.mode is Mode.WAITING:
            return plan
        moved = move(running, plan, self._mesh.name_of, room_for=self._plans.gives_way_to())
        return replace(plan, moved=moved)

    def _leaving(self) -> set[NodeId]:
        """Members that go as soon as others do without them: until then they go on with what they lend."""
        return {member.id for member in self._mesh.alive() if member.facts.state is State.DRAINING}

    def _is_outdone(self) -> bool:
        """Whether another node has begun to serve since the plan that starts was proposed."""
        rival = self._plans.rival()
        return rival is not None and rival[1] != self._instead_of

    def _current(self, settings: ModelSettings, number: int, own: PlanRun | None) -> ServingPlan | None:
        """The plan of that number that serves the mesh, whoever hosts it."""
        published = self._plans.replicas().get(number)
        if published is not None and published[0] != self._mesh.me:
            # One that was made by other settings is no reason to stay with it: all decide anew, and alike.
            return published[1] if published[1].settings_version == settings.plan_version else None
        if own is not None and own.broken is None and own.settings.plan_version == settings.plan_version:
            return ServingPlan(epoch=own.epoch, plan=own.plan, settings_version=settings.plan_version)
        return None


def _lasts(current: ServingPlan | None, barred: Mapping[NodeId, str]) -> bool:
    """Whether the plan that serves need not end soon: nobody in it is about to leave."""
    return current is not None and not barred.keys() & {
        current.plan.host,
        *(stage.node for stage in current.plan.stages),
    }
