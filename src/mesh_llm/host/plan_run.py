"""One plan, brought up: leases of its workers, links to them, an engine over all of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp

from mesh_llm.defaults import ENGINE_STAGES_S, LEASE_SILENCE_S, PLAN_READY_S
from mesh_llm.engine.spec import EngineSpec, LinkSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.telemetry import Flows, Gauge, Rates
from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.host.declined_ops import warnings
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.data_links import DataLinks, Link
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import refusal
from mesh_llm.tasks import cancelled, task_group
from mesh_llm.transport.network import Stream
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

PLAN_CHECK_S = 60.0
"""For the first token through all stages."""
COMPLAINT_S = 1.0
"""For the loss of a worker to show by itself, after another one has complained of it."""
_COMPLAINTS = ("the link to worker ", "the stage before it ")
"""What workers say of each other (native/worker)."""

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BYTES = 1 << 53
"""That a worker may claim to have: more is no number of bytes, but of digits in a sentence."""


class StageLost(MeshError):
    """A worker refused its layers, or was lost with them."""

    def __init__(self, node: NodeId, message: str) -> None:
        super().__init__(message)
        self.node = node


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
    ) -> None:
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
        self.resident: dict[Place, int] = {}
        self.supervisor: EngineSupervisor | None = None
        self.warnings: tuple[str, ...] = ()
        """What works, and costs more than it should."""
        self.gauge = Gauge()
        self.rates = Rates()
        self.is_ready = False
        self._fingerprint = fingerprint
        self._mesh = mesh
        self._data_links = data_links
        self._specify = specify
        self._on_report = on_report
        self._became_ready = asyncio.Event()
        self._lost: StageLost | None = None
        self._log_file = log_file
        self._task: asyncio.Task[None] | None = None
        self._wake: Callable[[], None] = lambda: None
        self._tell: Callable[[str], None] = lambda _: None
        self._loaded: dict[Place, tuple[int, int]] = {}

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

    def engine_address(self) -> tuple[str, str]:
        """URL and key of its engine."""
        assert self.supervisor is not None
        return f"http://127.0.0.1:{self.supervisor.report.port}", self.supervisor.spec.key

    @property
    def port(self) -> int | None:
        ready = self.supervisor is not None and self.supervisor.report.state is EngineState.READY
        return self.supervisor.report.port if ready and self.supervisor else None

    def counters(self) -> dict[Place, StageCounters]:
        """What the workers have done since they were linked."""
        return self._by_place(self.supervisor.report.stages) if self.supervisor is not None else {}

    def paces(self) -> dict[Place, StageCounters]:
        """What they did in the last second in which they had to do."""
        return self._by_place(self.supervisor.report.paces) if self.supervisor is not None else {}

    def flows(self) -> dict[Place, Flows]:
        """What crosses their links now, and at best."""
        if self.supervisor is None:
            return {}
        report = self.supervisor.report
        silent = time.monotonic() - report.stages_at > 2 * ENGINE_STAGES_S
        found = self._by_place(report.flows)
        return {place: each.idle() for place, each in found.items()} if silent else found

    def _by_place(self, stages: Mapping[str, T]) -> dict[Place, T]:
        names = {f"MESH{index}": stage.place for index, stage in enumerate(self.plan.workers)}
        return {names[name]: stage for name, stage in stages.items() if name in names}

    @property
    def speculation(self) -> SpeculationCounters | None:
        """What drafts have done; None without them."""
        return self.supervisor.report.speculation if self.supervisor is not None else None

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
            workers = self.plan.workers
            async with task_group() as group:
                leases = [group.create_task(self._lease(stage, stack)) for stage in workers]
            for stage, lease in zip(workers, leases, strict=True):
                watch = asyncio.create_task(self._watch(stage, lease.result()), name="lease")
                stack.push_async_callback(cancelled, watch)
            links = await self._open_links(stack)
            numbers = await self._introduce()
            await self._run_engine(self._link_specs(links, numbers), links)

    async def _lease(self, stage: Stage, stack: AsyncExitStack) -> Stream:
        """Ask a worker for its layers; returns when they are in its memory."""
        name = self._mesh.name_of(stage.node)
        header: dict[str, Any] = {
            "epoch": self.epoch,
            "fingerprint": self._fingerprint,
            "first": stage.first,
            "last": stage.last,
            "need_bytes": stage.need_bytes,
            "head": self.plan.head_on_worker and stage is self.plan.stages[-1],
            "device": stage.device,
        }
        if self.settings.adapters:
            header["adapters"] = [adapter.file.digest for adapter in self.settings.adapters]
        try:
            async with asyncio.timeout(LEASE_SILENCE_S):
                stream = await self._mesh.open(stage.node, "lease", header)
            stack.push_async_callback(_finished, stream)
            while True:
                async with asyncio.timeout(LEASE_SILENCE_S):
                    answer = await stream.read_document()
                match answer:
                    case {"ready": True, "resident_bytes": int(resident)} if 0 <= resident < _MOST_BYTES:
                        self.resident[stage.place] = resident
                        return stream
                    case {"done_bytes": int(done), "total_bytes": int(total)} if (
                        0 <= done < _MOST_BYTES and 0 <= total < _MOST_BYTES
                    ):
                        self._progress(stage.place, done, total, fetching=answer.get("fetching") is True)
                    case {"refused": str()}:
                        reason = refusal(answer, "it gave no reason")
                        raise StageLost(stage.node, f"{name} refused its layers: {reason}")
                    case _:
                        raise StageLost(stage.node, f"{name} sent an invalid answer")
        except TimeoutError:
            raise StageLost(stage.node, f"{name} did not answer within {LEASE_SILENCE_S:.0f} s") from None
        except StageLost:
            raise
        except MeshError as error:
            raise StageLost(stage.node, f"{name} was lost: {error.message}") from error

    def _progress(self, place: Place, done: int, total: int, *, fetching: bool) -> None:
        self._loaded[place] = (done, total)
        done_sum = sum(done for done, _ in self._loaded.values())
        total_sum = sum(total for _, total in self._loaded.values())
        if total_sum:
            what = "fetch" if fetching else "load"
            self._tell(f"workers {what} their layers: {100 * done_sum // total_sum} %")

    async def _watch(self, stage: Stage, lease: Stream) -> None:
        """A lease that ends is a worker that is lost."""
        reason = "the connection to it broke"
        with suppress(MeshError):
            answer = await lease.read_document()
            reason = refusal(answer, reason)
        self._break(stage.node, reason)

    def _break(self, node: NodeId, reason: str) -> None:
        if self.broken is None and not (self._task is not None and self._task.done()):
            self._lost = StageLost(node, f"{self._mesh.name_of(node)} was lost: {reason}")
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

    async def _introduce(self) -> list[int | None]:
        """Let neighbours link up, so that activations need not come back here in between."""
        workers = self.plan.workers
        async with task_group() as group:
            tasks = [
                group.create_task(self._introduce_pair(stage.place, following.place))
                for stage, following in pairwise(workers)
            ]
        return [*(task.result() for task in tasks), *([None] if workers else [])]

    async def _introduce_pair(self, place: Place, following: Place) -> int | None:
        number = secrets.randbelow(1 << 31)
        header: dict[str, Any] = {"epoch": self.epoch, "next": following.node, "number": number}
        header |= {"device": place.device, "next_device": following.device}
        linked = False
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(LEASE_SILENCE_S):
                stream = await self._mesh.open(place.node, "introduce", header)
                answer = await stream.read_document()
                await stream.finish()
                linked = answer.get("linked") is True
                if not linked:
                    reason = refusal(answer, "it gave no reason")
                    log.warning("workers not linked epoch=%d: %s", self.epoch, reason)
        self.pushes[place] = linked
        return number if linked else None

    def _link_specs(self, links: Sequence[Link], numbers: Sequence[int | None]) -> tuple[LinkSpec, ...]:
        return tuple(
            LinkSpec(
                name=f"MESH{index}",
                fd=link.socket.fileno(),
                layers=stage.last - stage.first,
                next_number=number,
            )
            for index, (stage, link, number) in enumerate(zip(self.plan.workers, links, numbers, strict=True))
        )

    async def _run_engine(self, specs: tuple[LinkSpec, ...], links: Sequence[Link]) -> None:
        spec = self._specify(self.plan, specs)
        self._tell("the model is loading")
        supervisor = self.supervisor = EngineSupervisor(spec, self._log_file, self._on_engine)
        running = asyncio.create_task(supervisor.run(), name=f"engine of plan {self.epoch}")
        ready = asyncio.create_task(self._became_ready.wait(), name="engine ready")
        try:
            await asyncio.wait((running, ready), timeout=PLAN_READY_S, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                self._raise_stage_lost()
                running.result()
            if not ready.done():
                raise EngineFailed(f"the engine was not ready within {PLAN_READY_S:.0f} s")
            # The child has copies of its own. With ours open, workers would not notice that it died.
            for link in links:
                link.socket.close()
            if specs:
                await self._check()
            self.is_ready = True
            self._wake()
            await running
        finally:
            await cancelled(ready)
            await cancelled(running)

    def _on_engine(self, report: EngineReport) -> None:
        if report.state is EngineState.READY:
            self.warnings = warnings(report.declined, self.plan.workers, self._mesh.name_of)
            self._became_ready.set()
        for name, cause in report.failed_links.items():
            if self.is_ready and cause.startswith(_COMPLAINTS):
                asyncio.get_running_loop().call_later(COMPLAINT_S, self._break, self._node_of(name), cause)
            elif self.is_ready:
                self._break(self._node_of(name), cause)
        self._on_report(self, report)

    def _node_of(self, link: str) -> NodeId:
        return self.plan.workers[int(link.removeprefix("MESH"))].node

    def _raise_stage_lost(self) -> None:
        assert self.supervisor is not None
        failed = self.supervisor.report.failed_links
        for name in sorted(failed, key=lambda name: failed[name].startswith(_COMPLAINTS)):
            node = self._node_of(name)
            raise StageLost(node, f"{self._mesh.name_of(node)} was lost: {failed[name]}")

    async def _check(self) -> None:
        """One token through every stage, before anybody is told to send requests here."""
        url, key = self.engine_address()
        body: dict[str, Any] = {"prompt": "1", "n_predict": 1, "cache_prompt": False}
        timeout = aiohttp.ClientTimeout(total=PLAN_CHECK_S)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(f"{url}/completion", json=body) as answer,
            ):
                if answer.status not in (200, 501):
                    self._raise_stage_lost()
                    raise EngineFailed(f"the split engine fails: {(await answer.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._raise_stage_lost()
            raise EngineFailed(f"the split engine does not answer: {error!r}") from error


async def _finished(stream: Stream) -> None:
    with suppress(MeshError, TimeoutError):
        async with asyncio.timeout(1.0):
            await stream.finish()
