"""Drives the plans of one model that this node hosts.

On every change it asks `decide` what should run. Where this node is to host it,
a `PlanRun` brings the plan up beside the one that still serves: leases of all
workers, links, an engine, a readiness check. Only then is it published, and the
old one drains. What fails is tried again, without the offender, after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mesh_llm.defaults import ENGINE_SETTLED_S
from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.host.decisions import Decisions
from mesh_llm.host.ending_runs import EndingRuns
from mesh_llm.host.memory_return import MemoryReturn
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.host.worker_leases import StageLost
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import ModelDemand
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.planning.backoff import NEEDED_SHARE, Backoff, BetterPlan
from mesh_llm.planning.lanes import LaneDemand
from mesh_llm.types import Mode, ModelFacts, NodeId, Plan, ServingPlan, State

PLAN_TICK_S = 1.0
"""Between two looks at the plan when nothing was heard: pauses end, and barred nodes come back."""
PLAN_GATHER_S = 0.02
"""After a change, before the look at the plan: changes come in flocks."""
PLAN_PAUSE, PLAN_PAUSE_MOST_S = 4, 1.0
"""As many times as long as the last look took: whatever others tell, most time is for answers."""
PLAN_RETRY_FIRST_S = 0.2
PLAN_RETRY_LAST_S = 30.0
"""Between two attempts to bring a plan up, where no node is to blame."""


log = logging.getLogger(__name__)


class HostingWatcher(Protocol):
    """Who wants to know what the host does."""

    def on_hosting(self, state: State, reason: str) -> None:
        """What it is about, while it does not serve."""

    def on_standing_by(self) -> None:
        """Somebody else is to host."""

    def on_serving(self, run: PlanRun) -> None: ...

    def on_failed(self, reason: str) -> None:
        """A plan of this node's did not come about, or ended."""

    def leans_on(self, run: PlanRun) -> bool:
        """Whether requests go to this replaced engine until its successor can be reached from here."""

    def on_drained(self) -> None:
        """A replaced engine takes no more requests."""

    def is_crowded(self, now: float) -> bool:
        """Whether requests wait for the engine that serves."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Of the plans that this node hosted, since it was started."""

    proposed: int = 0
    served: int = 0
    failed: int = 0
    """Before they served, or later."""
    dropped: int = 0
    """For a better one, before they served."""
    workers_lost: int = 0


class Hosting:
    def __init__(
        self,
        *,
        mesh: Mesh,
        plans: ModelPlans,
        make_run: Callable[[int, Plan], PlanRun],
        model: Callable[[], tuple[ModelFacts, ModelSettings] | None],
        watcher: HostingWatcher,
        demand: ModelDemand,
        asked_for: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`asked_for`: answers under way here, and requests that wait."""
        self._asked_for = asked_for
        self._lanes = LaneDemand()
        self._mesh = mesh
        self._demand = demand
        self._plans = plans
        self._make_run = make_run
        self._model = model
        self._watcher = watcher
        self._decisions = Decisions(mesh, plans, demand)
        self._attempts = Backoff()
        self._wake = asyncio.Event()
        self._pause_s = PLAN_RETRY_FIRST_S
        self._not_before = 0.0
        self._better = BetterPlan()
        self.ending = EndingRuns(is_needed=watcher.leans_on, on_drained=watcher.on_drained)
        self._memory_return = MemoryReturn(mesh, plans)
        self._served_at_s = 0.0
        self._started: dict[NodeId, int] = {}
        """When members that failed had been started."""
        self._fatal: MeshError | None = None
        self.tally = Tally()
        self.plan: Plan | None = None
        """What should run, as this node sees it."""
        self.serving: PlanRun | None = None
        self.starting: PlanRun | None = None
        """The one that is being brought up, beside the one that serves."""
        self._has_served = False
        self._last_broken: str | None = None
        """Why the plan that served last broke: answers may ask when it is gone already."""
        self._closing = False

    @property
    def runs(self) -> tuple[PlanRun, ...]:
        """All that may have an engine here: the one that serves, its successor, those that drain."""
        return tuple(
            run for run in (self.serving, self.starting, *self.ending.draining.values()) if run is not None
        )

    def wake(self) -> None:
        """Something has changed."""
        self._wake.set()

    def find(self, epoch: object) -> PlanRun | None:
        """The plan of that epoch, while its engine takes requests; also one that was just replaced."""
        serving = self.serving
        run = serving if serving is not None and serving.epoch == epoch else None
        if run is None and isinstance(epoch, int):
            run = self.ending.draining.get(epoch)
        return run if run is not None and run.port is not None and run.broken is None else None

    async def why(self, port: int) -> str:
        """Why the engine on `port` broke off, once that is known; asked by the gateway."""
        run = self.serving
        if run is None:
            return self._last_broken or "the engine was stopped"
        return run.broken if run.broken is not None else await run.lanes.why(port)

    def last(self) -> PlanRun | None:
        """The replaced plan that can still answer, until its successor elsewhere is known."""
        return self.find(max(self.ending.draining, default=None))

    async def close(self) -> None:
        """The model is no longer to be served here: let answers finish."""
        self._closing = True
        self.wake()
        while self.serving is not None or self.starting is not None:
            await asyncio.sleep(PLAN_GATHER_S)
        await self.ending.drained()

    async def run(self) -> None:
        """Returns only by failing or being cancelled."""
        took_s = 0.0
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._next_look_s()):
                        await self._wake.wait()
                # What happens at once is looked at once.
                await asyncio.sleep(max(PLAN_GATHER_S, min(PLAN_PAUSE * took_s, PLAN_PAUSE_MOST_S)))
                self._wake.clear()
                began = time.thread_time()
                self._step()
                took_s = time.thread_time() - began
                if self._fatal is not None:
                    raise self._fatal
        finally:
            starting = (run for run in (self.starting, self.serving) if run is not None)
            await self.ending.end_all(starting)

    def _next_look_s(self) -> float:
        now = asyncio.get_running_loop().time()
        ends = [self._not_before, self._memory_return.until_s, self._attempts.next_change(now=now) or 0.0]
        return min([PLAN_TICK_S, *(end - now for end in ends if end > now)])

    # -- decisions -----------------------------------------------------------------------------

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        self._look_at_runs(now)
        streams, waiting = self._asked_for()
        served = self.serving is not None
        self._lanes = self._lanes.after(streams=streams, waiting=waiting, now=now) if served else LaneDemand()
        self._forgive()
        is_over = self._closing or self._demand.is_over
        if is_over:
            self._drop_starting("the model is not to be served any more")
        known = None if is_over else self._model()
        if known is None:
            self._retire()
            if is_over and self.plan is not None:
                self.plan = None
                self._plans.decide({})
                self._watcher.on_standing_by()
            return
        model, settings = known
        if settings.most_replicas > settings.least_replicas:
            self._plans.crowd(self.serving is not None and self._watcher.is_crowded(now))
        self._renumber()
        self._memory_return.look(settings, now)
        failed = self._attempts.barred(now=now)
        decided = partial(
            self._decisions.made,
            model,
            settings,
            serving=self.serving,
            starting=self.starting,
            lanes=self._lanes.lanes,
        )
        plans = decided(failed)
        if failed and _wait(plans):
            plans = decided(self._attempts.barred(now=now, share=NEEDED_SHARE))
        failing = self._memory_return.failing()
        if failing and (_wait(plans) or self._memory_return.is_awaited()):
            plans = decided({**failed, **failing})
        plans, reserved = self._decisions.with_room(plans, model, settings, failing)
        self._plans.decide(reserved)
        plan = self.plan = self._decisions.own_part(plans, is_free=not (self.serving or self.starting))
        if self._plans.replica not in plans:
            self._make_way(plan)
        elif plan.host != self._mesh.me:
            # While the model leaves its memory to others, they may well run here.
            own_failure = None if self._mesh.me in failing else failed.get(self._mesh.me)
            self._stand_back(plan, own_failure=own_failure)
        elif self._plans.rival() is None and _still_good(self.serving, plan, settings):
            if self.serving is not None:
                self._follow(self.serving, plan, settings)
            self._drop_starting("the plan that serves is the best one")
        elif not _still_good(self.starting, plan, settings):
            self._drop_starting(f"another one is better: {plan.reason}")
            waits = _serves(self.serving) and self._better.waits(_key(plan, settings), now=now)
            if now >= self._not_before and not waits and self._has_room_for(plan):
                self._start(plan)

    def _follow(self, serving: PlanRun, plan: Plan, settings: ModelSettings) -> None:
        """What can change of a plan while it serves: its lanes, and the version of its settings."""
        changed = serving.plan.lanes != plan.lanes
        if changed or serving.plan.lanes_reason != plan.lanes_reason:
            log.info("lanes=%d epoch=%d %s", plan.lanes, serving.epoch, plan.lanes_reason)
            serving.follow(plan)
        if changed or serving.settings.plan_version != settings.plan_version:
            self._publish_serving(serving, settings)

    def _renumber(self) -> None:
        number = self._plans.other_number() if self.serving is not None else None
        if self.serving is not None and number is not None:
            self._drop_starting("the plan that serves has another number")
            self._plans.replica = number
            self._publish_serving(self.serving, self.serving.settings)

    def _forgive(self) -> None:
        """A node that was started anew is not the one that failed."""
        for node, started in list(self._started.items()):
            if (now := self._mesh.started(node)) is not None and now != started:
                self._attempts = self._attempts.forget(node)
                del self._started[node]

    def _retire(self) -> None:
        """Make way for a plan of somebody else's that serves, or for none."""
        if self.serving is None:
            return
        if self._demand.is_over:
            # It has no successor that others had to hear of, and its memory is waited for.
            self._end(self.serving, at_once=not self._demand.is_busy())
        elif self._closing or self._plans.rival() is not None or self.serving.broken is not None:
            self._end(self.serving)

    def _make_way(self, plan: Plan) -> None:
        """There is one replica too many: this one."""
        self._drop_starting("there are enough replicas")
        if self.serving is not None:
            self._end(self.serving)
        if plan.mode is not Mode.WAITING:
            self._watcher.on_standing_by()

    def _stand_back(self, plan: Plan, *, own_failure: str | None) -> None:
        """Somebody else hosts, or nobody can."""
        hosts = plan.host is not None and f"{self._mesh.name_of(plan.host)} is to host"
        self._drop_starting(hosts or plan.reason)
        self._retire()
        if self.serving is not None and plan.mode is Mode.WAITING:
            self._end(self.serving)
        if own_failure is not None:
            # Said for as long as it lasts: the others elect by it.
            self._watcher.on_hosting(State.FAILED, own_failure)
        elif plan.mode is Mode.WAITING:
            self._watcher.on_hosting(State.WAITING, plan.reason)
        elif self.serving is None:
            self._watcher.on_standing_by()

    # -- runs ----------------------------------------------------------------------------------

    def _start(self, plan: Plan) -> None:
        epoch = self._plans.next_epoch()
        log.info(
            "plan proposed epoch=%d mode=%s stages=%d: %s", epoch, plan.mode, len(plan.stages), plan.reason
        )
        self.tally.proposed += 1
        self._decisions.begin()
        run = self.starting = self._make_run(epoch, plan)
        self._plans.begin(self._as_published(run, run.settings))
        run.start(self.wake, lambda reason: self._watcher.on_hosting(State.LOADING, reason))
        self._watcher.on_hosting(State.LOADING, "the plan is being prepared")

    def _has_room_for(self, plan: Plan) -> bool:
        """Beside the engines that still run here; where there is none, the serving one makes room first."""
        runs = [*self.ending.draining.values(), *([self.serving] if self.serving is not None else [])]
        stages = [stage for each in (plan, *(run.plan for run in runs)) for stage in each.stages]
        need_bytes = sum(stage.need_bytes for stage in stages if stage.node == self._mesh.me)
        if not runs or need_bytes <= self._plans.own_memory_bytes():
            return True
        if self.serving is not None:
            self._end(self.serving)
            self._watcher.on_hosting(State.LOADING, "the old plan is making room for the next one")
        return False

    def _drop_starting(self, why: str) -> None:
        if self.starting is not None:
            log.info("plan dropped epoch=%d: %s", self.starting.epoch, why)
            self.tally.dropped += 1
            self.ending.end(self.starting)
            self.starting = None
            self._plans.begin(None)

    def _look_at_runs(self, now: float) -> None:
        starting = self.starting
        # First: one that was ready may have ended since.
        if starting is not None and (error := starting.failure()) is not None:
            self.starting = None
            self._plans.begin(None)
            self.ending.end(starting)
            self._on_failure(starting, error, now)
        elif starting is not None and starting.is_ready:
            self.starting = None
            self._publish(starting)
        serving = self.serving
        if serving is not None and now - self._served_at_s >= ENGINE_SETTLED_S:
            self._pause_s = PLAN_RETRY_FIRST_S
        if serving is not None and (error := serving.failure()) is not None:
            # One that lost a worker fails every request: its memory is better used by the next one.
            self._end(serving)
            self._on_failure(serving, error, now, well_s=now - self._served_at_s)

    def _publish(self, run: PlanRun) -> None:
        old, self.serving = self.serving, run
        self._served_at_s = asyncio.get_running_loop().time()
        self._has_served = True
        self.tally.served += 1
        log.info("plan serving epoch=%d mode=%s", run.epoch, run.plan.mode)
        self._publish_serving(run, run.settings)
        self._watcher.on_serving(run)
        if old is not None:
            self.ending.drain(old)

    def _publish_serving(self, run: PlanRun, settings: ModelSettings) -> None:
        run.settings = settings
        self._plans.publish(self._as_published(run, settings))

    def _as_published(self, run: PlanRun, settings: ModelSettings) -> ServingPlan:
        return ServingPlan(
            epoch=run.epoch,
            plan=run.plan,
            settings_version=settings.plan_version,
            fingerprint=settings.fingerprint,
            replica=self._plans.replica,
        )

    def _on_failure(self, run: PlanRun, error: MeshError, now: float, well_s: float = 0.0) -> None:
        log.warning("plan failed epoch=%d: %s", run.epoch, error.message)
        self.tally.failed += 1
        self._watcher.on_failed(error.message)
        self._memory_return.failed(now=now, well_s=well_s)
        if isinstance(error, StageLost):
            self.tally.workers_lost += 1
            self._attempts = self._attempts.failed(error.node, error.message, now=now)
            self._started[error.node] = self._mesh.started(error.node) or 0
        elif self._plans.is_default and not self._has_served and _is_hopeless(self._mesh, run, error):
            self._fatal = error
            return
        elif _serves(self.serving):
            self._better = self._better.failed(_key(run.plan, run.settings), now=now)
        else:
            again = self._pause_s > PLAN_RETRY_FIRST_S
            self._not_before = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, PLAN_RETRY_LAST_S)
            if again and self._mesh.has_company():
                # Others may host while this node cannot. They hear of it by its state.
                self._attempts = self._attempts.failed(self._mesh.me, error.message, now=now)
                self._watcher.on_hosting(State.FAILED, error.message)
                return
        self._watcher.on_hosting(State.LOADING, f"{error.message}; trying again")

    def _end(self, run: PlanRun, *, at_once: bool = False) -> None:
        """End a run that no longer serves; what is broken does not wait for its answers."""
        if run is self.serving:
            self.serving, self._last_broken = None, run.broken
            self._plans.publish(None)
        if run.failure() is not None or at_once:
            self.ending.end(run)
        else:
            self.ending.drain(run)


def _serves(run: PlanRun | None) -> bool:
    return run is not None and run.broken is None


def _key(plan: Plan, settings: ModelSettings) -> tuple[object, ...]:
    """What an engine is started for."""
    return (*plan.key, *settings.engine_key)


def _wait(plans: Mapping[int, Plan]) -> bool:
    return all(plan.mode is Mode.WAITING for plan in plans.values())


def _is_hopeless(mesh: Mesh, run: PlanRun, error: MeshError) -> bool:
    """Alone, and not once able to load the only model: a person has to look at it."""
    settings = mesh.settings()
    alone = not mesh.has_company() and (settings is None or not settings.others)
    return isinstance(error, EngineFailed) and alone and not run.plan.workers


def _still_good(run: PlanRun | None, plan: Plan, settings: ModelSettings) -> bool:
    """Whether there is an engine, and it is what the plan and the settings ask for."""
    if run is None:
        return False
    same = run.settings.engine_key == settings.engine_key
    return same and run.broken is None and run.plan.key == plan.key and not run.is_outdated()
