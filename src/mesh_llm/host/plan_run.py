"""One plan, brought up: leases of its workers, links to them, an engine over all of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Protocol, TypeVar

from mesh_llm.defaults import ENGINE_STAGES_S
from mesh_llm.engine.spec import EngineSpec, LinkSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.telemetry import Flows, Rates
from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.host.declined_ops import warnings
from mesh_llm.host.introductions import introduce
from mesh_llm.host.lane import Lane
from mesh_llm.host.lane_group import LaneFailed, LaneGroup
from mesh_llm.host.worker_leases import StageLost, WorkerLeases
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.data_links import DataLinks, Link
from mesh_llm.peers.mesh import Mesh
from mesh_llm.tasks import task_group
from mesh_llm.types import (
    Fingerprint,
    LinkKind,
    NodeId,
    Place,
    Plan,
    SpeculationCounters,
    Stage,
    StageCounters,
)

COMPLAINT_S = 1.0
"""For the loss of a worker to show by itself, after another one has complained of it."""
_COMPLAINTS = ("the link to worker ", "the stage before it ", "it was given up, since ")
"""What is said of one worker where another one is lost (native/worker, native/host)."""

log = logging.getLogger(__name__)

T = TypeVar("T", StageCounters, Flows)


class Specify(Protocol):
    def __call__(self, plan: Plan, links: tuple[LinkSpec, ...]) -> EngineSpec: ...


class PlanRun:
    """Lives in a task of its own, from the first lease to the engine's end."""

    def __init__(
        self,
        *,
        epoch: int,
        plan: Plan,
        fingerprint: Fingerprint,
        settings: ModelSettings,
        mesh: Mesh,
        data_links: DataLinks,
        specify: Specify,
        on_report: Callable[[PlanRun, EngineReport], None],
        log_file: Path,
        is_outdated: Callable[[], bool] = lambda: False,
        on_lanes: Callable[[PlanRun], None] = lambda _: None,
    ) -> None:
        """`on_lanes`: it has more or fewer engines to answer with."""
        self.epoch = epoch
        self.plan = plan
        self.settings = settings
        self.is_outdated = is_outdated
        """Whether an engine that is started now would have files that this one has not."""
        self.broken: str | None = None
        """Why it serves no longer, although its engine may still run."""
        self._links: dict[Place, Link] = {}
        self.pushes: dict[Place, bool] = {}
        """Workers, and whether they pass activations straight to the next one."""
        self._leases = WorkerLeases(
            epoch=epoch,
            fingerprint=fingerprint,
            adapters=settings.adapters,
            mesh=mesh,
            on_lost=self._break,
        )
        self.lanes = LaneGroup(
            slots=plan.slots,
            wanted=plan.lanes,
            routed=bool(plan.workers),
            on_report=self._on_engine,
            on_change=self._on_lanes,
        )
        self.warnings: tuple[str, ...] = ()
        """What works, and costs more than it should."""
        self.rates = Rates()
        self.is_ready = False
        self._mesh = mesh
        self._data_links = data_links
        self._specify = specify
        self._on_report = on_report
        self._tell_lanes = on_lanes
        self._lost: MeshError | None = None
        self._log_file = log_file
        self._task: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None
        self._tell: Callable[[str], None] = lambda _: None

    # -- for its owner -------------------------------------------------------------------------

    def start(self, wake: Callable[[], None], tell: Callable[[str], None]) -> None:
        self._wake, self._tell = wake, tell
        self._task = asyncio.create_task(self._live(), name=f"plan {self.epoch}")
        self._task.add_done_callback(lambda _: wake())

    def cancel(self) -> None:
        # Once: a second time would interrupt the end of the engine, and leave it to nobody.
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))
            self.failure()

    def failure(self) -> MeshError | None:
        """Why it has ended, or is about to."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return self._lost
        error = self._task.exception()
        if error is not None and not isinstance(error, MeshError):
            # A mistake of ours, or the system's: it may cost a plan, and not the node.
            log.error("plan ended unexpectedly epoch=%d", self.epoch, exc_info=error)
            return EngineFailed(f"an unexpected error ended the plan: {error!r}")
        return self._lost or error or EngineFailed("the engine ended")

    def follow(self, plan: Plan) -> None:
        """The same plan with another number of lanes: they come and go while it serves."""
        self.plan = replace(
            self.plan,
            stages=plan.stages,
            need_bytes=plan.need_bytes,
            lanes=plan.lanes,
            lanes_reason=plan.lanes_reason,
        )
        self.lanes.want(plan.lanes)

    @property
    def supervisor(self) -> EngineSupervisor | None:
        """Of its first engine that answers, or is to."""
        lane = self.lanes.first
        return lane.supervisor if lane is not None else None

    def engine_address(self) -> tuple[str, str]:
        """Of the first one."""
        assert self.supervisor is not None
        return f"http://127.0.0.1:{self.supervisor.report.port}", self.supervisor.spec.key

    @property
    def port(self) -> int | None:
        ready = self.supervisor is not None and self.supervisor.report.state is EngineState.READY
        return self.supervisor.report.port if ready and self.supervisor else None

    def counters(self) -> dict[Place, StageCounters]:
        """What the workers have done for its engines since they were linked."""
        return self._by_place(*(lane.report.stages for lane in self.lanes.all))

    def paces(self) -> dict[Place, StageCounters]:
        """What they did in the last second in which they had to do."""
        return self._by_place(*(lane.report.paces for lane in self.lanes.all))

    def flows(self) -> dict[Place, Flows]:
        """What crosses their links now, and at best."""
        return self._by_place(*(_flows(lane.report) for lane in self.lanes.all))

    def _by_place(self, *stages: Mapping[str, T]) -> dict[Place, T]:
        names = {f"MESH{index}": stage.place for index, stage in enumerate(self.plan.workers)}
        found: dict[Place, T] = {}
        for name, stage in (pair for lane in stages for pair in lane.items()):
            if (place := names.get(name)) is not None:
                found[place] = found[place].plus(stage) if place in found else stage
        return found

    @property
    def speculation(self) -> SpeculationCounters | None:
        """What drafts have done; None without them."""
        known = [lane.report.speculation for lane in self.lanes.all]
        found = [each for each in known if each is not None]
        return reduce(SpeculationCounters.plus, found) if found else None

    @property
    def resident_bytes(self) -> int:
        """Of weights in the workers' memory."""
        return sum(self._leases.resident.values())

    def link_kind(self, place: Place) -> LinkKind | None:
        """The way that the link to a worker takes now."""
        link = self._links.get(place)
        if link is None or not link.moves:
            return link.kind if link is not None else None
        return self._mesh.paths.of_streams(place.node)

    # -- its life ------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._bring_up()
        except asyncio.CancelledError:
            if self._lost is not None:
                raise self._lost from None
            raise

    async def _bring_up(self) -> None:
        async with AsyncExitStack() as stack:
            await self._leases.take(self.plan, stack, self._tell)
            numbers = await introduce(self.plan, self.epoch, self._mesh)
            self.pushes = {place: number is not None for place, number in numbers.items()}
            self._tell("the model is loading")
            try:
                await self.lanes.keep(
                    self._open_links,
                    lambda links: self._specify(self.plan, self._link_specs(links, numbers)),
                    self._log_file,
                )
            except LaneFailed as failed:
                # What its engine says of a worker that is lost is told by `_on_engine` once it serves.
                for node, cause in [] if failed.lane.served else self._lost_links(failed.lane.report):
                    raise StageLost(node, f"{self._mesh.name_of(node)} was lost: {cause}") from failed
                raise failed.error from failed

    def _break(self, node: NodeId, reason: str) -> None:
        self.give_up(StageLost(node, f"{self._mesh.name_of(node)} was lost: {reason}"))

    def give_up(self, error: MeshError) -> None:
        """It does not serve any longer, whatever its engine does."""
        if self.broken is None and not (self._task is not None and self._task.done()):
            self._lost = error
            self.broken = self._lost.message
            log.warning("plan broken epoch=%d: %s", self.epoch, self.broken)
            # The engine fails every request from here on: there is nothing left to wait for.
            self.cancel()
            self._wake()

    async def _open_links(self, stack: AsyncExitStack) -> list[Link]:
        async def open_one(stage: Stage) -> Link:
            purpose = {"kind": "session", "epoch": self.epoch, "device": stage.device}
            try:
                link = await self._data_links.link(stage.node, purpose)
            except MeshError as error:
                raise StageLost(
                    stage.node, f"no link to {self._mesh.name_of(stage.node)}: {error.message}"
                ) from error
            stack.callback(link.socket.close)
            self._links[stage.place] = link
            return link

        async with task_group() as group:
            tasks = [group.create_task(open_one(stage)) for stage in self.plan.workers]
        return [task.result() for task in tasks]

    def _link_specs(self, links: Sequence[Link], numbers: Mapping[Place, int | None]) -> tuple[LinkSpec, ...]:
        return tuple(
            LinkSpec(
                name=f"MESH{index}",
                fd=link.socket.fileno(),
                layers=stage.last - stage.first,
                next_number=numbers.get(stage.place),
            )
            for index, (stage, link) in enumerate(zip(self.plan.workers, links, strict=True))
        )

    # -- engines -------------------------------------------------------------------------------

    def _on_lanes(self) -> None:
        self.is_ready = self.is_ready or any(lane.is_ready for lane in self.lanes.all)
        self._tell_lanes(self)
        self._wake()

    def _on_engine(self, lane: Lane, report: EngineReport) -> None:
        if report.state is EngineState.READY:
            self.warnings = warnings(report.declined, self.plan.workers, self._mesh.name_of)
        for node, cause in self._lost_links(report) if lane.is_ready else ():
            if cause.startswith(_COMPLAINTS):
                asyncio.get_running_loop().call_later(COMPLAINT_S, self._break, node, cause)
            else:
                self._break(node, cause)
        self._on_report(self, report)

    def _lost_links(self, report: EngineReport) -> list[tuple[NodeId, str]]:
        """Workers and causes; those that only complain of another one come last."""
        # The engine begins each cause with the link's name.
        found = [
            (self.plan.workers[int(name.removeprefix("MESH"))].node, cause.removeprefix(f"{name}: "))
            for name, cause in report.failed_links.items()
        ]
        return sorted(found, key=lambda each: each[1].startswith(_COMPLAINTS))


def _flows(report: EngineReport) -> dict[str, Flows]:
    silent = time.monotonic() - report.stages_at > 2 * ENGINE_STAGES_S
    return {name: each.idle() for name, each in report.flows.items()} if silent else report.flows
