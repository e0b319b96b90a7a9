"""How often a model runs: by what owners set, by demand, and by what the mesh has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from mesh_llm.errors import UsageError
from mesh_llm.host.decisions import Decisions
from mesh_llm.local.own_settings import version_after
from mesh_llm.membership.member import Member, Standing, serving_among
from mesh_llm.mesh_settings import MeshSettings, parse_replicas
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands, ModelDemand
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.planning.decide import decide
from mesh_llm.planning.other_models import without
from mesh_llm.planning.replicas import CROWDED_AFTER_S, CROWDED_UNTIL_S, Crowding, wanted_replicas
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import Mode, NodeId, Plan, ServingPlan
from tests.support.planning import model, node, settings


class OneMesh:
    """What every node of a mesh knows, seen by one of them; hosts serve what a test says."""

    def __init__(self, me: str, *nodes: Candidate, replicas: tuple[int, int]) -> None:
        self.me = NodeId(me)
        self.nodes = {each.id: each for each in nodes}
        self.settings_in_force = settings(replicas=replicas)
        self.served: dict[NodeId, dict[str, Any]] = {}

    def serve(self, host: str, *plans: ServingPlan, **facts: Any) -> None:
        first = [plan for plan in plans if plan.replica == 0]
        more = tuple(plan for plan in plans if plan.replica)
        self.served[NodeId(host)] = {"serving": first[0] if first else None, "replicas": more, **facts}

    def settings(self) -> MeshSettings:
        return self.settings_in_force

    def alive(self) -> list[Member]:
        return [self._member(each) for each in self.nodes.values()]

    def _member(self, each: Candidate) -> Member:

        return Member(
            id=each.id,
            standing=Standing.ALIVE,
            incarnation=1,
            facts=replace(each.facts, **self.served.get(each.id, {})),
            rtt_s=None,
            connected=True,
            via=(),
            since=0.0,
        )

    def member(self, id: NodeId) -> Member:
        return self._member(self.nodes[id])

    def replicas(self, fingerprint: object = None) -> Mapping[int, Any]:
        return serving_among(self.alive(), self.settings(), None)

    def snapshot(self) -> Snapshot:
        return Snapshot(nodes=tuple(self.nodes.values()))

    def unready(self) -> dict[NodeId, str]:
        return {}


def plans_of(mesh: OneMesh) -> ModelPlans:
    known = cast(Mesh, mesh)
    return ModelPlans(HostedPlans(known, lambda: None), mesh.settings().fingerprint)


def made(mesh: OneMesh) -> dict[int, Plan]:
    plans = plans_of(mesh)
    demands = Demands(cast(Mesh, mesh), lambda: None, facts=lambda _: None)
    demand = ModelDemand(demands, plans, is_busy=lambda: False)
    decisions = Decisions(cast(Mesh, mesh), plans, demand)
    return decisions.made(model(), mesh.settings(), {}, serving=None, starting=None)


def serving(mesh: OneMesh, plan: Plan, *, epoch: int, replica: int = 0) -> ServingPlan:
    known = mesh.settings()
    return ServingPlan(
        epoch=epoch,
        plan=plan,
        settings_version=known.plan_version,
        fingerprint=known.fingerprint,
        replica=replica,
    )


NODES = (node("ann", 26, gb_s=50), node("ben", 26, gb_s=40), node("cay", 26, gb_s=30))


def test_replicas_are_planned_on_nodes_of_their_own_and_alike_everywhere() -> None:
    decided = [made(OneMesh(me, *NODES, replicas=(2, 2))) for me in ("ann", "ben", "cay")]
    assert decided[0] == decided[1] == decided[2]
    assert [plan.host for plan in decided[0].values()] == ["ann", "ben"]
    contexts = {plan.context for plan in decided[0].values()}
    assert len(contexts) == 1


def test_replicas_that_need_several_nodes_each_share_none() -> None:
    nodes = [node(name, 14, gb_s=40) for name in ("ann", "ben", "cay", "dan")]
    decided = [made(OneMesh(each.id, *nodes, replicas=(2, 2))) for each in nodes]
    assert all(plans == decided[0] for plans in decided)
    first, second = decided[0].values()
    assert first.mode is second.mode is Mode.SPLIT
    assert {*first.nodes}.isdisjoint(second.nodes)


def test_a_replica_that_fits_nowhere_waits_and_leaves_the_others_alone() -> None:
    decided = made(OneMesh("ann", *NODES[:2], replicas=(3, 3)))
    assert [plan.mode for plan in decided.values()] == [Mode.SOLO, Mode.SOLO, Mode.WAITING]


def test_the_loss_of_one_moves_no_other() -> None:
    mesh = OneMesh("cay", *NODES, replicas=(2, 2))
    before = made(mesh)
    mesh.serve("ben", serving(mesh, before[1], epoch=5, replica=1))
    del mesh.nodes[NodeId("ann")]
    after = made(mesh)
    assert after[1].key == before[1].key
    assert after[0].host == "cay"


def test_one_more_runs_while_requests_wait() -> None:
    mesh = OneMesh("cay", *NODES, replicas=(1, 3))
    first = made(mesh)[0]
    mesh.serve("ann", serving(mesh, first, epoch=5))
    assert [plan.key for plan in made(mesh).values()] == [first.key]
    mesh.serve("ann", serving(mesh, first, epoch=5), crowded=(5,))
    assert [plan.host for plan in made(mesh).values()] == ["ann", "ben"]
    second = made(mesh)[1]
    mesh.serve("ben", serving(mesh, second, epoch=6, replica=1), crowded=(6,))
    assert [plan.host for plan in made(mesh).values()] == ["ann", "ben", "cay"]


def test_a_plan_takes_another_number_where_its_own_is_taken_or_the_first_is_free() -> None:
    mesh = OneMesh("ben", *NODES, replicas=(2, 2))
    plans, plan = plans_of(mesh), made(mesh)[1]
    plans.replica = 1
    mesh.serve("ben", serving(mesh, plan, epoch=5, replica=1))
    assert plans.other_number() == 0
    plans.replica = 0
    mesh.serve("ben", serving(mesh, plan, epoch=5))
    assert plans.other_number() is None
    mesh.serve("ann", serving(mesh, plan, epoch=6))
    assert plans.rival() is not None
    assert plans.other_number() == 1
    mesh.settings_in_force = settings(replicas=(1, 1))
    assert plans.other_number() is None


def test_crowding_is_told_late_and_taken_back_later() -> None:
    crowding = Crowding()

    def look(now: float, taken: int, waiting: int = 0) -> bool:
        return crowding.look(now=now, taken=taken, waiting=waiting, slots=4)

    assert not look(1000, 4, 2)
    assert not look(1001, 4, 0)
    assert not look(1002, 4, 1)
    assert look(1002 + CROWDED_AFTER_S, 4, 1)
    assert look(1010, 3)
    assert look(1009 + CROWDED_UNTIL_S, 2), "more than half was taken since"
    assert not look(1010 + CROWDED_UNTIL_S, 2)


def test_six_models_over_fifty_nodes_are_planned_in_no_time() -> None:
    """`python -m bench.run --only replicas` measures it; here nothing may become slower by an order."""
    nodes = [node(f"n{number:02}", 14 + number % 5, gb_s=20 + number % 7) for number in range(50)]
    plans: list[Plan] = []
    began_s = time.process_time()
    for number in range(6):
        left = without(Snapshot(nodes=tuple(nodes)), plans, before=plans)
        plans.append(decide(left, model(layers=30 - 2 * number), settings(), current=None))
    assert time.process_time() - began_s < 1.0
    assert all(plan.mode is not Mode.WAITING for plan in plans)


def test_how_often_is_bounded_by_what_owners_set() -> None:
    assert [wanted_replicas(settings(replicas=(2, 3)), crowded) for crowded in range(4)] == [2, 2, 3, 3]
    assert wanted_replicas(settings(), 5) == 1


def test_more_replicas_are_no_reason_to_plan_anew() -> None:
    before = version_after(None, settings())
    after = version_after(before, settings(replicas=(1, 2)))
    assert (after.version, after.plan_version) == (before.version + 1, before.plan_version)
    assert after.replicas == (1, 2)


def test_replicas_as_they_are_typed() -> None:
    assert [parse_replicas(text) for text in ("1", "2-4", "16")] == [(1, 1), (2, 4), (16, 16)]
    for text, reason in (("0", "not between 1 and 16"), ("3-2", "at least as large"), ("x", "1-2")):
        with pytest.raises(UsageError, match=reason):
            parse_replicas(text)
