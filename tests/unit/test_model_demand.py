"""When a model on demand is loaded, and when it goes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.mesh_settings import MeshSettings, ModelSettings
from mesh_llm.peers import model_demand
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands, ModelDemand
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.types import Demand, Fingerprint, HeldModel, NodeFacts, NodeId, Role, ServingPlan
from tests.support import planning

ME, BEN, CLIENT = NodeId("a" * 64), NodeId("b" * 64), NodeId("c" * 64)
TINY, CODER, BIG = Fingerprint("tiny"), Fingerprint("coder"), Fingerprint("big")


def settings() -> MeshSettings:
    others = tuple(
        ModelSettings(model=name, fingerprint=name, alias=name, on_demand=True, idle_s=120)
        for name in (CODER, BIG)
    )
    return MeshSettings(version=1, model="tiny", fingerprint=TINY, alias="tiny", others=others)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


class FewMembers:
    """This node and one other, as a test sets them."""

    me = ME

    def __init__(self) -> None:
        self.facts = NodeFacts(name="me", role=Role.NODE, version="1")
        self.others = {BEN: replace(self.facts, name="ben")}
        self.settings_in_force = settings()

    def settings(self) -> MeshSettings:
        return self.settings_in_force

    def alive(self) -> list[Any]:
        facts = {self.me: self.facts, **self.others}
        return [SimpleNamespace(id=id, facts=each) for id, each in facts.items()]

    def publish(self, **changes: Any) -> None:
        self.facts = replace(self.facts, **changes)

    def serving(self, fingerprint: Fingerprint) -> tuple[NodeId, ServingPlan] | None:
        plans = ((id, plan) for id, facts in self._all() for plan in facts.also_serving)
        return next(((id, plan) for id, plan in plans if plan.fingerprint == fingerprint), None)

    def _all(self) -> list[tuple[NodeId, NodeFacts]]:
        return [(self.me, self.facts), *self.others.items()]


class Hosted:
    """The demand for one model, at a node that may host it."""

    def __init__(self, clock: Clock, fingerprint: Fingerprint = CODER) -> None:
        self.clock, self.mesh = clock, FewMembers()
        self.busy = False
        mesh = cast(Mesh, self.mesh)
        self.changes = 0
        self.demands = Demands(mesh, self._changed, facts=lambda _: None)
        self.plans = ModelPlans(HostedPlans(mesh, lambda: None), fingerprint)
        self.demand = ModelDemand(self.demands, self.plans, is_busy=lambda: self.busy)

    @property
    def told(self) -> list[Demand]:
        return list(self.mesh.facts.demand)

    def _changed(self) -> None:
        self.changes += 1

    def load(self) -> None:
        plan = ServingPlan(epoch=1, plan=planning.plan_of((ME, 0, 40)), fingerprint=CODER)
        self.plans.publish(plan)
        self.demand.load()

    def ben_says(self, *demand: Demand, **facts: Any) -> None:
        self.mesh.others[BEN] = replace(self.mesh.others[BEN], demand=demand, **facts)

    def after(self, seconds: float) -> bool:
        """Whether it is over then."""
        self.clock.now += seconds
        self.demands.tell()
        return self.demand.is_over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(model_demand, "time", clock)
    return clock


@pytest.fixture
def hosted(clock: Clock) -> Hosted:
    return Hosted(clock)


def test_it_rests_until_somebody_waits_for_it(hosted: Hosted) -> None:
    assert hosted.demand.rests
    assert hosted.demand.loads
    hosted.demand.want()
    assert hosted.told == [Demand(fingerprint=CODER, wanted=True)]
    assert not hosted.demand.is_over
    assert hosted.changes == 1
    assert hosted.after(1) is False
    assert hosted.after(5) is True
    assert hosted.told == []


def test_another_nodes_word_is_enough_and_a_clients_is_passed_on(hosted: Hosted) -> None:
    hosted.ben_says(Demand(fingerprint=CODER, wanted=True))
    assert not hosted.demand.is_over
    hosted.demands.tell()
    assert hosted.told == []
    hosted.ben_says(Demand(fingerprint=CODER, wanted=True), role=Role.CLIENT)
    hosted.demands.tell()
    assert hosted.told == [Demand(fingerprint=CODER, wanted=True)]


def test_pinned_models_and_the_default_one_never_rest(clock: Clock) -> None:
    hosted = Hosted(clock, TINY)
    assert not hosted.demand.is_over
    hosted.mesh.settings_in_force = replace(settings(), on_demand=True)
    assert not hosted.demand.is_over
    assert not hosted.demand.loads
    hosted.demand.want()
    assert hosted.told == []


def test_it_goes_after_its_idle_time_and_never_while_it_answers(hosted: Hosted) -> None:
    hosted.load()
    assert hosted.after(119) is False
    hosted.busy = True
    assert hosted.after(1000) is False
    hosted.busy = False
    assert hosted.after(119) is False
    assert hosted.after(2) is True


def test_it_makes_room_for_one_that_is_waited_for(hosted: Hosted) -> None:
    hosted.load()
    hosted.ben_says(Demand(fingerprint=BIG, wanted=True), Demand(fingerprint=CODER, goes_for=BIG))
    assert hosted.after(50) is False, "a model that was just loaded stays"
    assert hosted.told == []
    assert hosted.after(20) is True
    assert hosted.told == [Demand(fingerprint=CODER, idle_since=1_000_001_000)]


@pytest.mark.parametrize(
    "claims",
    [
        [Demand(fingerprint=CODER, goes_for=BIG)],
        [Demand(fingerprint=CODER, goes_for=Fingerprint("nosuch"))],
        [Demand(fingerprint=CODER, goes_for=CODER)],
        [Demand(fingerprint=BIG, wanted=True)],
    ],
    ids=[
        "nobody waits for that one",
        "no model of the mesh",
        "no owner's word",
        "nobody asks for its memory",
    ],
)
def test_it_does_not_go_for_nothing(hosted: Hosted, claims: list[Demand]) -> None:
    hosted.load()
    hosted.ben_says(*claims)
    assert hosted.after(100) is False


def test_an_owner_unloads_it_at_once(hosted: Hosted) -> None:
    hosted.load()
    hosted.busy = True
    hosted.ben_says(Demand(fingerprint=CODER, goes_for=CODER), role=Role.OWNER)
    assert hosted.demand.is_over


def test_what_others_host_is_theirs_to_end(hosted: Hosted) -> None:
    plan = ServingPlan(epoch=1, plan=planning.plan_of((ME, 0, 40)), fingerprint=CODER)
    hosted.ben_says(also_serving=(plan,))
    assert hosted.after(10_000) is False


def test_one_node_says_why_it_does_not_serve(hosted: Hosted) -> None:
    hosted.demand.want()
    hosted.demand.reason, hosted.demand.hopeless = "it needs more", True
    assert not hosted.demand.loads
    hosted.demands.tell()
    assert hosted.told[0].reason == ""
    hosted.mesh.facts = replace(
        hosted.mesh.facts, models=(HeldModel(fingerprint=CODER, name="coder", size_bytes=1),)
    )
    hosted.demands.tell()
    assert hosted.told[0].reason == "it needs more"
    # Whoever asks next is not refused for what was so long ago.
    hosted.after(10)
    hosted.after(1)
    assert hosted.demand.loads


def test_why_a_pinned_model_waits_is_told_by_one_that_has_its_file(hosted: Hosted) -> None:
    pinned = replace(settings(), others=tuple(replace(each, on_demand=False) for each in settings().others))
    hosted.mesh.settings_in_force = pinned
    hosted.demand.reason = "need 3 GB"
    hosted.demands.tell()
    assert hosted.told == []
    hosted.mesh.facts = replace(
        hosted.mesh.facts, models=(HeldModel(fingerprint=CODER, name="coder", size_bytes=1),)
    )
    hosted.demands.tell()
    assert hosted.told == [Demand(fingerprint=CODER, reason="need 3 GB")]
    assert not hosted.demands.is_wanted(CODER)
    hosted.load()
    hosted.demands.tell()
    assert hosted.told == []


def test_a_node_without_the_file_hears_from_others(hosted: Hosted) -> None:
    hosted.ben_says(Demand(fingerprint=CODER, reason="it needs 9 GB", hopeless=True))
    word = hosted.demand.word()
    assert word is not None
    assert word.reason == "it needs 9 GB"
    assert not hosted.demand.loads
