"""Two models where there may be memory for one: every node's hosting of both, with runs that do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.mesh_settings import MeshSettings, ModelSettings, as_one
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands, ModelDemand
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.planning import backoff
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Demand, Fingerprint, Mode, ModelFacts, NodeFacts, NodeId, Plan, ServingPlan, State
from tests.support import planning

BIG, CODER = planning.FINGERPRINT, Fingerprint("c" * 64)
BOTH = (planning.HELD, replace(planning.HELD, fingerprint=CODER, name="coder"))
BESIDE = replace(as_one(planning.settings()), model="coder", alias="coder", fingerprint=CODER)


def settings(*, big: int | None = None, coder: int | None = None, **more: Any) -> MeshSettings:
    other = replace(BESIDE, priority=coder, **more)
    return planning.settings(priority=big, others=(other,))


class Members:
    """What all nodes know alike."""

    def __init__(self, *nodes: Candidate) -> None:
        self.settings = settings()
        self.nodes = {
            each.id: replace(each, facts=replace(each.facts, models=BOTH, state=State.SERVING))
            for each in nodes
        }
        self.runs: list[Run] = []
        self.broken: set[str] = set()
        """Models whose engine does not start."""

    def wanted(self, fingerprint: Fingerprint) -> ModelSettings:
        found = self.settings.of(fingerprint)
        assert found is not None
        return found

    def served(self) -> dict[str, NodeId]:
        """Who hosts each model, by its name."""
        return {
            self.wanted(plan.fingerprint).alias: id
            for id, node in self.nodes.items()
            for plan in published(node.facts)
        }

    def started(self, name: str) -> int:
        """How often an engine was started for a model."""
        return sum(run.settings.alias == name for run in self.runs)


def published(facts: NodeFacts) -> list[ServingPlan]:
    return [*([facts.serving] if facts.serving is not None else []), *facts.also_serving]


def plans_of(members: Members, model: Fingerprint) -> list[Plan]:
    """By which a model is served."""
    served = [plan for node in members.nodes.values() for plan in published(node.facts)]
    return [each.plan for each in served if each.fingerprint == model]


class OneView:
    """The mesh, as one node has it."""

    def __init__(self, members: Members, me: NodeId) -> None:
        self.members, self.me = members, me

    @property
    def facts(self) -> NodeFacts:
        return self.members.nodes[self.me].facts

    def publish(self, **changes: Any) -> None:
        node = self.members.nodes[self.me]
        self.members.nodes[self.me] = replace(node, facts=replace(node.facts, **changes))

    def snapshot(self) -> Snapshot:
        return planning.mesh(*self.members.nodes.values())

    def settings(self) -> MeshSettings:
        return self.members.settings

    def alive(self) -> list[Any]:
        return [SimpleNamespace(id=id, facts=node.facts) for id, node in self.members.nodes.items()]

    def replicas(self, fingerprint: Fingerprint | None = None) -> dict[int, tuple[NodeId, ServingPlan]]:
        wanted = fingerprint or BIG
        found = [
            (each.id, plan)
            for each in self.alive()
            for plan in published(each.facts)
            if plan.fingerprint == wanted
        ]
        return {0: max(found, key=lambda each: (each[1].epoch, each[0]))} if found else {}

    def serving(self, fingerprint: Fingerprint | None = None) -> tuple[NodeId, ServingPlan] | None:
        return self.replicas(fingerprint).get(0)

    def highest_epoch(self) -> int:
        return max((run.epoch for run in self.members.runs), default=0)

    def unready(self) -> dict[NodeId, str]:
        return {}

    def name_of(self, node: NodeId) -> str:
        return str(node)

    def started(self, node: NodeId) -> int:
        return 1

    def has_company(self) -> bool:
        return len(self.members.nodes) > 1


class Run:
    """Ready at once, or never."""

    port = broken = None
    lanes = SimpleNamespace(addresses=lambda: (), slots=1)

    def __init__(self, epoch: int, plan: Plan, settings: ModelSettings, *, fails: bool) -> None:
        self.epoch, self.plan, self.settings = epoch, plan, settings
        self.is_ready = not fails

    def start(self, wake: Callable[[], None], tell: Callable[[str], None]) -> None: ...

    def failure(self) -> MeshError | None:
        return None if self.is_ready else EngineFailed("the engine exited with status 1")

    def is_outdated(self) -> bool:
        return False

    def cancel(self) -> None: ...

    async def ended(self) -> None: ...


class Watcher:
    """Hears all that hosting tells, and remembers the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_hosting(self, state: State, reason: str) -> None:
        self.reasons.append(reason)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Node:
    """Its hosting of both models."""

    def __init__(self, members: Members, me: NodeId) -> None:
        mesh = cast(Mesh, OneView(members, me))
        hosted, demands = HostedPlans(mesh, self.wake), Demands(mesh, self.wake, facts=self.facts)
        self.plans = {each: ModelPlans(hosted, each) for each in (BIG, CODER)}
        self.watchers = {each: Watcher() for each in self.plans}
        self.hosting = [self._hosting(members, mesh, demands, plans) for plans in self.plans.values()]

    def _hosting(self, members: Members, mesh: Mesh, demands: Demands, plans: ModelPlans) -> Hosting:
        assert plans.fingerprint is not None
        fingerprint = plans.fingerprint

        def run(epoch: int, plan: Plan) -> PlanRun:
            wanted = members.wanted(fingerprint)
            members.runs.append(Run(epoch, plan, wanted, fails=wanted.alias in members.broken))
            return cast(PlanRun, members.runs[-1])

        return Hosting(
            mesh=mesh,
            plans=plans,
            make_run=run,
            model=lambda: (self.facts(fingerprint), members.wanted(fingerprint)),
            watcher=cast(Any, self.watchers[fingerprint]),
            demand=ModelDemand(demands, plans, is_busy=lambda: False),
        )

    def facts(self, fingerprint: Fingerprint) -> ModelFacts:
        return planning.model(fingerprint=fingerprint)

    def wake(self) -> None:
        for each in self.hosting:
            each.wake()


@asynccontextmanager
async def running(*machines: Candidate) -> AsyncIterator[tuple[Members, list[Node]]]:
    members = Members(*machines)
    nodes = [Node(members, id) for id in members.nodes]
    tasks = [asyncio.create_task(hosting.run()) for node in nodes for hosting in node.hosting]
    try:
        yield members, nodes
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


async def until(nodes: list[Node], condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            for node in nodes:
                node.wake()
            await asyncio.sleep(0.01)


async def looked(nodes: list[Node], times: int = 5) -> None:
    """Until every node has decided anew, some times."""
    for _ in range(times):
        for node in nodes:
            for plans in node.plans.values():
                plans.decided = {}
        await until(nodes, lambda: all(plans.decided for node in nodes for plans in node.plans.values()))


async def test_of_equals_the_one_that_runs_stays() -> None:
    async with running(planning.node("me", 30)) as (members, nodes):
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.settings = settings(big=-3, coder=-3)
        await looked(nodes)
        assert members.served() == {"big": "me"}
        assert (members.started("big"), members.started("coder")) == (1, 0)


async def test_a_higher_priority_takes_the_place_of_a_lower_one_once() -> None:
    """The other machine has no room for either; both nodes see it alike."""
    async with running(planning.node("me", 30), planning.node("weak", 5)) as (members, nodes):
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.served() == {"coder": "me"})
        await looked(nodes)
        assert members.served() == {"coder": "me"}
        assert (members.started("big"), members.started("coder")) == (1, 1)
        seen = [{name: plan.key for name, plan in node.plans[CODER].decided.items()} for node in nodes]
        assert seen[0] == seen[1]

        members.settings = settings(big=9, coder=5)
        await until(nodes, lambda: members.served() == {"big": "me"})
        assert (members.started("big"), members.started("coder")) == (2, 1)


def told_of_room(nodes: list[Node]) -> set[str]:
    """All sentences of any node about who makes room for the other model."""
    return {why for node in nodes for why in node.watchers[CODER].reasons if " room for it" in why}


async def test_nodes_say_who_goes_why_and_at_what_price() -> None:
    async with running(planning.node("me", 30), planning.node("weak", 5)) as (members, nodes):
        members.settings = settings(context=1 << 20)
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.served() == {"coder": "me"})
        said = told_of_room(nodes)
        assert said == {"big goes to make room for it; 20.0 GB to read again when it comes back"}
        for node in nodes:
            hears = node.watchers[BIG].reasons
            price = "it would fit without coder, 20.0 GB to read then"
            await until(nodes, partial(lambda reasons, price: price in "".join(reasons[-1:]), hears, price))
        [plan] = plans_of(members, CODER)
        assert plan.moved == "", "it ran nowhere before"


async def test_nodes_say_what_moves_where_why_and_at_what_price() -> None:
    """The plan that follows goes on saying it. The other machine is too small for the one that needs room."""
    machines = planning.node("me", 30), planning.node("zoe", 23, gb_s=20, engine="another")
    async with running(*machines) as (members, nodes):
        members.settings = settings(context=1 << 20)
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.settings = settings(coder=5, context=32768)
        await until(nodes, lambda: members.served() == {"big": "zoe", "coder": "me"})
        assert told_of_room(nodes) == {"big moves to zoe to make room for it; 20.0 GB to read there"}
        moved = "moved from me to make room for coder, at the price of reading 20.0 GB"
        await until(nodes, lambda: [plan.moved for plan in plans_of(members, BIG)] == [moved])
        await looked(nodes)
        assert [plan.moved for node in nodes for plan in node.plans[BIG].decided.values()] == [moved, moved]
        assert [plan.moved for plan in plans_of(members, CODER)] == [""]


async def test_what_moves_since_it_is_faster_elsewhere_says_the_price() -> None:
    machines = planning.node("me", 30), planning.node("zoe", 23, gb_s=20, engine="another")
    async with running(*machines) as (members, nodes):
        members.settings = settings(context=1 << 20)
        await until(nodes, lambda: members.served() == {"big": "me"})
        slower = replace(members.nodes[NodeId("me")].facts, speed=planning.speed(5))
        members.nodes[NodeId("me")] = replace(members.nodes[NodeId("me")], facts=slower)
        await until(nodes, lambda: [plan.host for plan in plans_of(members, BIG)] == ["zoe"])
        [plan] = plans_of(members, BIG)
        assert plan.reason == "fits on zoe alone, the fastest of 2 nodes that hold it"
        assert plan.moved == "moved from me, at the price of reading 20.0 GB"


async def test_what_stays_with_less_context_says_why() -> None:
    async with running(planning.node("me", 46)) as (members, nodes):
        members.settings = replace(settings(), context=None, others=(replace(BESIDE, context=1 << 20),))
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.settings = replace(members.settings, others=(replace(BESIDE, priority=5),))
        await until(nodes, lambda: members.served() == {"big": "me", "coder": "me"})
        await until(nodes, lambda: len(plans_of(members, BIG)) == 1)
        [plan] = plans_of(members, BIG)
        assert plan.context == 20992
        assert plan.moved == "loaded anew to make room for coder, with nothing new to read"
        why = "big is loaded anew with 20992 tokens of context to make room for it; nothing new to read"
        assert told_of_room(nodes) == {why}


async def test_where_both_fit_a_priority_moves_nothing() -> None:
    async with running(planning.node("me", 30), planning.node("zoe", 30)) as (members, nodes):
        await until(nodes, lambda: len(members.served()) == 2)
        before = members.served()
        members.settings = settings(coder=5)
        await looked(nodes)
        assert members.served() == before
        assert (members.started("big"), members.started("coder")) == (1, 1)


async def test_a_model_on_demand_takes_nobodys_place_by_its_priority() -> None:
    async with running(planning.node("me", 30)) as (members, nodes):
        await until(nodes, lambda: members.served() == {"big": "me"})
        wanted = (Demand(fingerprint=CODER, wanted=True),)
        members.nodes = {
            id: replace(each, facts=replace(each.facts, demand=wanted)) for id, each in members.nodes.items()
        }
        members.settings = settings(coder=5, on_demand=True)
        await looked(nodes)
        assert members.served() == {"big": "me"}
        assert (members.started("big"), members.started("coder")) == (1, 0)


@pytest.mark.parametrize("others", [(), (planning.node("weak", 5),)], ids=["alone", "in company"])
async def test_a_higher_priority_that_keeps_failing_gives_the_memory_back(
    others: tuple[Candidate, ...],
) -> None:
    """It may fail once by chance; after that the lower one has its memory, and nobody disturbs it."""
    async with running(planning.node("me", 30), *others) as (members, nodes):
        await until(nodes, lambda: members.served() == {"big": "me"})
        members.broken = {"coder"}
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.started("coder") == 2 and members.served() == {"big": "me"})
        await looked(nodes)
        assert members.served() == {"big": "me"}
        assert (members.started("big"), members.started("coder")) == (2, 2)
        for node in nodes:
            [plan] = node.plans[CODER].decided.values()
            assert plan.mode is Mode.WAITING
            told = {each.node: each.reason for each in plan.excluded}
            assert (
                told[NodeId("me")]
                == "failed with it again and again; others have its memory until it is tried again"
            )


async def test_what_failed_takes_its_place_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "GIVE_BACK_FIRST_S", 1.0)
    async with running(planning.node("me", 30)) as (members, nodes):
        members.broken = {"coder"}
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.started("coder") == 2 and members.served() == {"big": "me"})
        members.broken = set()
        await until(nodes, lambda: members.served() == {"coder": "me"})


async def test_an_owners_change_is_tried_at_once() -> None:
    async with running(planning.node("me", 30)) as (members, nodes):
        members.broken = {"coder"}
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.started("coder") == 2 and members.served() == {"big": "me"})
        members.broken = set()
        members.settings = settings(coder=5, predict=9)
        await until(nodes, lambda: members.served() == {"coder": "me"})


async def test_what_fails_beside_one_that_serves_is_tried_as_ever() -> None:
    async with running(planning.node("me", 60)) as (members, nodes):
        members.broken = {"coder"}
        members.settings = settings(coder=5)
        await until(nodes, lambda: members.served() == {"big": "me"} and members.started("coder") > 2)
        assert members.started("big") == 1


async def test_a_default_model_that_fails_does_not_end_a_node_that_serves_others() -> None:
    async with running(planning.node("me", 30)) as (members, nodes):
        members.broken = {"big"}
        members.settings = settings(big=5)
        await until(nodes, lambda: members.started("big") == 2 and members.served() == {"coder": "me"})
