"""The host's decisions, with runs that do nothing and a mesh that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.host import hosting
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.host.worker_leases import StageLost
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands, ModelDemand
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.planning import backoff, lanes
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import Fingerprint, HeldPart, NodeId, Plan, ServingPlan, State
from tests.support import planning

ME = NodeId("me")


class StillMesh:
    """Members that a test sets."""

    def __init__(self, *nodes: Candidate) -> None:
        self.me = ME
        self.nodes = nodes
        self.published: ServingPlan | None = None
        self.elsewhere: tuple[NodeId, ServingPlan] | None = None
        """What another node serves."""
        self.looks = 0
        self.leaving: dict[NodeId, str] = {}

    def snapshot(self) -> Any:
        self.looks += 1
        return planning.mesh(*self.nodes)

    def unready(self) -> dict[NodeId, str]:
        return self.leaving

    def settings(self) -> None: ...

    def serving(self, fingerprint: Fingerprint | None = None) -> tuple[NodeId, ServingPlan] | None:
        own = (ME, self.published) if self.published is not None else None
        both = [each for each in (own, self.elsewhere) if each is not None]
        return max(both, key=lambda each: (each[1].epoch, each[0]), default=None)

    def replicas(self, fingerprint: Fingerprint | None = None) -> dict[int, tuple[NodeId, ServingPlan]]:
        serving = self.serving()
        return {0: serving} if serving is not None else {}

    def alive(self) -> list[Any]:
        state = dict.fromkeys(self.leaving, State.DRAINING)
        return [
            SimpleNamespace(id=each.id, facts=replace(each.facts, state=state.get(each.id, each.facts.state)))
            for each in self.nodes
        ]

    def highest_epoch(self) -> int:
        serving = self.serving()
        return serving[1].epoch if serving is not None else 0

    def started(self, node: NodeId) -> int:
        return 1

    def has_company(self) -> bool:
        return len(self.nodes) > 1

    def name_of(self, node: NodeId) -> str:
        return str(node)

    def publish(self, *, serving: ServingPlan | None, **_: object) -> None:
        self.published = serving


class IdleRun:
    """Becomes ready, or fails, when a test says so."""

    port = None

    def __init__(self, epoch: int, plan: Plan, settings: MeshSettings) -> None:
        self.epoch, self.plan, self.settings = epoch, plan, settings
        self.broken: str | None = None
        self.lacks_a_file = False
        self.is_ready = False
        self.error: MeshError | None = None
        self.was_cancelled = False

    def start(self, wake: Callable[[], None], tell: Callable[[str], None]) -> None: ...

    def failure(self) -> MeshError | None:
        return self.error

    def is_outdated(self) -> bool:
        return self.lacks_a_file

    def follow(self, plan: Plan) -> None:
        self.plan = replace(self.plan, lanes=plan.lanes, lanes_reason=plan.lanes_reason)

    def cancel(self) -> None:
        self.was_cancelled = True

    async def ended(self) -> None: ...


class NodeMemory:
    def __init__(self, *nodes: Candidate, settings: MeshSettings | None = None) -> None:
        self.mesh = StillMesh(*nodes)
        self.settings = settings or planning.settings()
        self.runs: list[IdleRun] = []
        self.told: list[tuple[State, str]] = []
        self.asked_for = (0, 0)
        self.leant_on: PlanRun | None = None
        self.leant = 0
        self.drained = 0
        mesh = cast(Mesh, self.mesh)
        plans = ModelPlans(HostedPlans(mesh, lambda: None), None)
        demands = Demands(mesh, lambda: None, facts=lambda _: None)
        self.hosting = Hosting(
            mesh=mesh,
            plans=plans,
            demand=ModelDemand(demands, plans, is_busy=lambda: False),
            make_run=self._make_run,
            model=lambda: (planning.model(), self.settings),
            watcher=self,
            asked_for=lambda: self.asked_for,
        )

    def _make_run(self, epoch: int, plan: Plan) -> PlanRun:
        self.runs.append(IdleRun(epoch, plan, self.settings))
        return cast(PlanRun, self.runs[-1])

    def on_hosting(self, state: State, reason: str) -> None:
        self.told.append((state, reason))

    def on_standing_by(self) -> None: ...

    def on_serving(self, run: PlanRun) -> None: ...

    def on_failed(self, reason: str) -> None: ...

    def leans_on(self, run: PlanRun) -> bool:
        self.leant += run is self.leant_on
        return run is self.leant_on

    def on_drained(self) -> None:
        self.drained += 1

    def is_crowded(self, now: float) -> bool:
        return False

    def has_lanes(self, count: int) -> bool:
        return self.mesh.published is not None and self.mesh.published.plan.lanes == count

    async def until_serving(self) -> None:
        await self.until(lambda: bool(self.runs))
        self.runs[0].is_ready = True
        await self.until(lambda: self.mesh.published is not None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.hosting.wake()
                await asyncio.sleep(0.01)


@contextmanager
def driven(room: NodeMemory) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(room.hosting.run(), name="hosting")
    try:
        yield task
    finally:
        task.cancel()


async def test_a_ready_run_is_published_and_kept() -> None:
    room = NodeMemory(planning.node("me", 30))
    with driven(room):
        await room.until_serving()

        assert room.mesh.published is not None
        assert room.mesh.published.epoch == 1
        assert room.hosting.serving is cast(PlanRun, room.runs[0])
        assert len(room.runs) == 1


async def test_whatever_others_tell_most_time_is_not_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def long_look(_: Hosting) -> None:
        began = time.thread_time()
        while time.thread_time() < began + 0.05:
            pass
        looks.append(time.monotonic())

    monkeypatch.setattr(Hosting, "_step", long_look)
    room = NodeMemory(planning.node("me", 30))
    with driven(room):
        await room.until(lambda: len(looks) == 6)
    # The pause before the first is short.
    assert looks[-1] - looks[0] >= 5 * (1 + hosting.PLAN_PAUSE) * 0.05 * 0.95


async def test_alone_an_engine_that_never_ran_ends_the_node_with_its_reason() -> None:
    room = NodeMemory(planning.node("me", 30))
    with driven(room) as running:
        await room.until(lambda: bool(room.runs))
        room.runs[0].error = EngineFailed("the GPU is on fire")
        await asyncio.wait((running,), timeout=20)

        assert str(running.exception()) == "the GPU is on fire"


async def test_a_host_whose_engine_does_not_run_says_so_and_lets_others() -> None:
    room = NodeMemory(planning.node("me", 30), planning.node("other", 5))
    with driven(room):
        for number in range(2):
            await room.until(lambda number=number: len(room.runs) > number)  # type: ignore[misc]
            room.runs[number].error = EngineFailed("the GPU is on fire")
        await room.until(lambda: (State.FAILED, "the GPU is on fire") in room.told)
        said = len(room.told)
        await room.until(lambda: len(room.told) > said + 3)

        assert set(room.told[said : said + 3]) == {(State.FAILED, "the GPU is on fire")}


async def test_a_run_that_has_ended_is_not_published_although_it_was_ready() -> None:
    room = NodeMemory(planning.node("me", 30), planning.node("other", 5))
    with driven(room):
        await room.until(lambda: bool(room.runs))
        room.runs[0].error = EngineFailed("it ended: fire")
        room.runs[0].is_ready = True
        await room.until(lambda: len(room.runs) > 1)

    assert room.mesh.published is None
    assert room.hosting.tally.served == 0
    assert (State.LOADING, "it ended: fire; trying again") in room.told


async def test_runs_that_end_as_soon_as_they_serve_are_tried_again_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "PLAN_RETRY_FIRST_S", 0.05)
    room = NodeMemory(planning.node("me", 30))
    pauses = []
    with driven(room):
        for number in range(3):
            await room.until(lambda number=number: len(room.runs) > number)  # type: ignore[misc]
            run = room.runs[number]
            run.is_ready = True
            await room.until(lambda run=run: room.hosting.serving is cast(PlanRun, run))  # type: ignore[misc]
            failed = room.hosting.tally.failed
            run.error = EngineFailed("fire")
            await room.until(lambda failed=failed: room.hosting.tally.failed > failed)  # type: ignore[misc]
            pauses.append(room.hosting._pause_s)
            if number == 1:
                monkeypatch.setattr(hosting, "ENGINE_SETTLED_S", 0.0)

    # The last one served for long enough.
    assert pauses == [0.1, 0.2, 0.1]


async def test_a_lost_worker_is_left_out_of_the_next_plan() -> None:
    nodes = planning.node("me", 12), planning.node("one", 12), planning.node("two", 12)
    room = NodeMemory(*nodes)
    with driven(room):
        await room.until(lambda: bool(room.runs))
        lost = room.runs[0].plan.workers[0].node
        room.runs[0].error = StageLost(lost, "it was lost")
        await room.until(lambda: len(room.runs) > 1)

        assert lost not in {stage.node for stage in room.runs[1].plan.stages}
        assert room.runs[1].epoch == 2


async def test_a_better_plan_that_nobody_follows_is_proposed_above_the_one_they_do() -> None:
    room = NodeMemory(planning.node("me", 30), planning.node("zoe", 30, gb_s=4))
    with driven(room):
        await room.until_serving()
        own = room.runs[0]
        # A node that returned has published under the same number, and its id is the higher one.
        zoe = NodeId("zoe")
        theirs = replace(own.plan, host=zoe, stages=(replace(own.plan.stages[0], node=zoe),))
        room.mesh.elsewhere = (
            zoe,
            ServingPlan(epoch=own.epoch, plan=theirs, settings_version=room.settings.version),
        )
        await room.until(lambda: len(room.runs) > 1)

        assert room.runs[1].epoch == own.epoch + 1
        assert room.runs[1].plan.host == ME
        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))
        assert room.mesh.serving() == (ME, room.mesh.published)
        await room.until(lambda: len(room.told) > 0)
        assert len(room.runs) == 2


async def test_without_room_for_two_engines_the_first_makes_way() -> None:
    room = NodeMemory(planning.node("me", 30))
    with driven(room):
        await room.until_serving()
        room.settings = planning.settings(version=2, cache_type_k="q8_0")
        await room.until(lambda: len(room.runs) > 1)

        assert room.runs[0].was_cancelled
        assert (State.LOADING, "the old plan is making room for the next one") in room.told


async def test_with_room_for_two_the_first_serves_until_the_second_is_ready() -> None:
    room = NodeMemory(planning.node("me", 60))
    with driven(room):
        await room.until_serving()
        room.settings = planning.settings(version=2, cache_type_k="q8_0")
        await room.until(lambda: len(room.runs) > 1)

        assert room.hosting.serving is cast(PlanRun, room.runs[0])
        assert not room.runs[0].was_cancelled
        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))


async def test_a_better_plan_that_fails_is_not_tried_all_the_time_while_another_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "PLAN_RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(hosting, "ENGINE_SETTLED_S", 0.0)
    monkeypatch.setattr(backoff, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(backoff, "RETRY_LAST_S", 1000.0)
    room = NodeMemory(planning.node("me", 60))
    with driven(room):
        await room.until_serving()
        room.settings = planning.settings(version=2, cache_type_k="q8_0")
        await room.until(lambda: len(room.runs) == 2)
        room.runs[1].error = EngineFailed("no such kernel")
        await room.until(lambda: room.hosting.tally.failed == 1)
        looks = room.mesh.looks
        await room.until(lambda: room.mesh.looks > looks + 5)
        assert len(room.runs) == 2
        assert room.hosting.serving is cast(PlanRun, room.runs[0])

        # Another one need not wait, and neither does the same one when nothing serves any more.
        room.settings = planning.settings(version=3, cache_type_k="f32")
        await room.until(lambda: len(room.runs) == 3)
        room.runs[2].error = EngineFailed("nor that one")
        await room.until(lambda: room.hosting.tally.failed == 2)
        room.runs[0].error = EngineFailed("it ended")
        await room.until(lambda: len(room.runs) == 4)
        assert room.runs[3].plan.key == room.runs[2].plan.key


async def test_a_file_that_has_come_is_worth_another_engine() -> None:
    room = NodeMemory(planning.node("me", 60))
    with driven(room):
        await room.until_serving()
        room.runs[0].lacks_a_file = True
        room.hosting.wake()
        await room.until(lambda: len(room.runs) > 1)
        assert room.hosting.serving is cast(PlanRun, room.runs[0])
        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))


async def test_a_replaced_engine_stays_while_requests_have_nowhere_else_to_go() -> None:
    room = NodeMemory(planning.node("me", 60))
    with driven(room):
        await room.until_serving()
        room.leant_on = cast(PlanRun, room.runs[0])
        room.settings = planning.settings(version=2, cache_type_k="q8_0")
        await room.until(lambda: len(room.runs) > 1)
        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))
        await room.until(lambda: room.leant >= 3)

        assert not room.runs[0].was_cancelled
        assert room.drained == 0
        room.leant_on = None
        await room.until(lambda: room.runs[0].was_cancelled)
        assert room.drained == 1


async def test_what_can_serve_at_once_comes_before_a_long_fetch() -> None:
    part = HeldPart(fingerprint=planning.FINGERPRINT)
    late = planning.node("late", 20, models=(), part=part)
    room = NodeMemory(planning.node("me", 60), late, settings=planning.settings(split=True))
    with driven(room):
        await room.until(lambda: bool(room.runs))
        assert planning.layers(room.runs[0].plan) == {"me": (0, 40)}
        room.runs[0].is_ready = True
        # It serves while the other one fetches, and until that is done.
        await room.until(lambda: len(room.runs) == 2)
        assert set(planning.layers(room.runs[1].plan)) == {"me", "late"}
        assert room.hosting.serving is cast(PlanRun, room.runs[0])
        assert not room.runs[0].was_cancelled
        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))


async def test_a_fetch_is_waited_for_where_nothing_else_can_serve() -> None:
    part = HeldPart(fingerprint=planning.FINGERPRINT)
    room = NodeMemory(planning.node("me", 14), planning.node("late", 14, models=(), part=part))
    with driven(room):
        await room.until(lambda: bool(room.runs))
        assert set(planning.layers(room.runs[0].plan)) == {"me", "late"}


async def test_while_nothing_serves_a_plan_that_is_on_its_way_is_not_given_up_for_a_better_one() -> None:
    me, other = planning.node("me", 60), planning.node("other", 30)
    room = NodeMemory(me, other, settings=planning.settings(split=True))
    with driven(room):
        await room.until_serving()
        # The worker is lost, and comes back while the plan without it is loaded.
        room.mesh.nodes = (me,)
        room.runs[0].error = StageLost(NodeId("other"), "it was lost")
        await room.until(lambda: len(room.runs) == 2)
        assert planning.layers(room.runs[1].plan) == {"me": (0, 40)}
        room.mesh.nodes = (me, other)
        room.hosting._attempts = room.hosting._attempts.forget(NodeId("other"))
        looks = room.mesh.looks
        await room.until(lambda: room.mesh.looks > looks + 3)

        assert len(room.runs) == 2
        room.runs[1].is_ready = True
        await room.until(lambda: len(room.runs) == 3)
        assert room.hosting.serving is cast(PlanRun, room.runs[1])
        assert set(planning.layers(room.runs[2].plan)) == {"me", "other"}


async def test_a_successor_on_its_way_is_kept_while_the_host_of_the_running_plan_leaves() -> None:
    me, zoe, third = planning.node("me", 30), planning.node("zoe", 30), planning.node("third", 30)
    room = NodeMemory(me, zoe, settings=planning.settings(split=True))
    with driven(room):
        await room.until_serving()
        host = NodeId("zoe")
        theirs = replace(room.runs[0].plan, host=host)
        room.mesh.elsewhere = (
            host,
            ServingPlan(epoch=9, plan=theirs, settings_version=room.settings.version),
        )
        room.mesh.leaving = {host: "it is stopping"}
        await room.until(lambda: len(room.runs) == 2)
        assert planning.layers(room.runs[1].plan) == {"me": (0, 40)}
        room.mesh.nodes = (me, zoe, third)
        looks = room.mesh.looks
        await room.until(lambda: room.mesh.looks > looks + 3)

        assert len(room.runs) == 2
        assert not room.runs[1].was_cancelled


async def test_a_plan_on_its_way_is_kept_while_one_of_its_workers_leaves() -> None:
    """The worker waits for its host; what serves soon comes first."""
    me, other, third = planning.node("me", 60), planning.node("other", 30), planning.node("third", 30)
    room = NodeMemory(me, other, third, settings=planning.settings(split=True))
    with driven(room):
        await room.until_serving()
        room.mesh.nodes = (me, other)
        room.runs[0].error = StageLost(NodeId("third"), "it was lost")
        await room.until(lambda: len(room.runs) == 2)
        room.mesh.leaving = {NodeId("other"): "is leaving"}
        looks = room.mesh.looks
        await room.until(lambda: room.mesh.looks > looks + 3)
        assert not room.runs[1].was_cancelled

        room.runs[1].is_ready = True
        await room.until(lambda: room.hosting.serving is cast(PlanRun, room.runs[1]))


async def test_before_anything_has_served_a_better_plan_is_begun_at_once() -> None:
    me, other = planning.node("me", 30), planning.node("other", 30)
    room = NodeMemory(me, settings=planning.settings(split=True))
    with driven(room):
        await room.until(lambda: bool(room.runs))
        room.mesh.nodes = (me, other)
        await room.until(lambda: len(room.runs) == 2)
        assert room.runs[0].was_cancelled


async def test_a_plan_on_its_way_is_given_up_when_one_of_its_nodes_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    me, other, third = planning.node("me", 30), planning.node("other", 30), planning.node("third", 30)
    room = NodeMemory(me, other, third, settings=planning.settings(split=True))
    with driven(room):
        await room.until_serving()
        room.mesh.nodes = (me, other)
        room.runs[0].error = StageLost(NodeId("third"), "it was lost")
        await room.until(lambda: len(room.runs) == 2)
        room.mesh.nodes = (me,)
        await room.until(lambda: len(room.runs) == 3)
        assert room.runs[1].was_cancelled
        assert planning.layers(room.runs[2].plan) == {"me": (0, 40)}
    assert f"plan dropped epoch=2: another one is better: {room.runs[2].plan.reason}" in caplog.messages


async def test_a_node_that_nothing_serves_without_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sooner than the next tick would have it: answers wait for it."""
    monkeypatch.setattr(hosting, "PLAN_TICK_S", 60.0)
    room = NodeMemory(planning.node("me", 14), planning.node("other", 14))
    with driven(room):
        await room.until(lambda: bool(room.runs))
        room.runs[0].error = StageLost(NodeId("other"), "it was lost")
        await room.until(lambda: any(state is State.WAITING for state, _ in room.told))
        failed_s = asyncio.get_running_loop().time()
        await room.until(lambda: len(room.runs) == 2)

        assert asyncio.get_running_loop().time() - failed_s < backoff.RETRY_FIRST_S / 2
        assert set(planning.layers(room.runs[1].plan)) == {"me", "other"}


async def test_a_node_that_others_serve_without_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "RETRY_FIRST_S", 60.0)
    monkeypatch.setattr(hosting, "NEEDED_SHARE", 0.0)
    room = NodeMemory(
        planning.node("me", 30), planning.node("other", 30), settings=planning.settings(split=True)
    )
    with driven(room):
        await room.until(lambda: bool(room.runs))
        room.runs[0].error = StageLost(NodeId("other"), "it was lost")
        await room.until(lambda: len(room.runs) == 2)
        assert planning.layers(room.runs[1].plan) == {"me": (0, 40)}
        looks = room.mesh.looks
        await room.until(lambda: room.mesh.looks > looks + 3)
        assert len(room.runs) == 2


async def test_a_plan_that_serves_gets_lanes_for_what_is_asked_and_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "LANES_MORE_S", 0.05)
    monkeypatch.setattr(lanes, "LANES_FEWER_S", 0.05)
    auto = planning.settings(split=True, lanes=0)
    room = NodeMemory(planning.node("me", 64), planning.node("other", 64), settings=auto)
    with driven(room):
        await room.until_serving()
        for asked_for, wanted in (((4, 2), 2), ((0, 0), 1)):
            room.asked_for = asked_for
            await room.until(partial(room.has_lanes, wanted))
        assert len(room.runs) == 1
