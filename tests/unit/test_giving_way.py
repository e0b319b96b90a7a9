"""What becomes of models that give way to another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh_llm.mesh_settings import ModelSettings, as_one
from mesh_llm.planning.decide import decide
from mesh_llm.planning.giving_way import GivingWay
from mesh_llm.planning.making_room import Loaded, Room
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import Fingerprint, ModelFacts, NodeId, Plan
from tests.support.planning import FINGERPRINT, HELD, mesh, model, node, settings

BIG, CODER = FINGERPRINT, Fingerprint("c" * 64)
HELD_BOTH = (HELD, replace(HELD, fingerprint=CODER))
MODELS = (
    as_one(settings(replicas=(1, 2))),
    replace(as_one(settings()), model="coder", alias="coder", fingerprint=CODER, priority=-1),
)


def machine(name: str, gb: float) -> Candidate:
    """Which takes no part in splits, as no two have the same engine."""
    return node(name, gb, models=HELD_BOTH, engine=name)


def facts(fingerprint: Fingerprint) -> ModelFacts:
    return model(fingerprint=fingerprint)


def on(machine: Candidate, layers: int = 40) -> Plan:
    """A plan of 20 GB, or more."""
    plan = decide(mesh(machine), model(layers), settings(), current=None)
    assert plan.host == machine.id, plan.reason
    return plan


def loaded(model: ModelSettings, *plans: Plan) -> Loaded:
    return Loaded(
        fingerprint=model.fingerprint, name=model.alias, priority=model.rank, gives_way=True, plans=plans
    )


def becomes(
    room: Room, *machines: Candidate, **beside: Sequence[Plan]
) -> dict[str, list[NodeId | None] | None]:
    """Who hosts each model that makes room then; None where that is not known."""
    running = {each.fingerprint: beside[each.alias] for each in MODELS if each.alias in beside}

    def may_go(own: ModelSettings) -> list[Loaded]:
        lower = [each for each in MODELS if each.alias in beside and each.rank < own.rank]
        return [loaded(each, *beside[each.alias]) for each in lower]

    way = GivingWay(
        snapshot=mesh(*machines), beside=running, models=MODELS, facts=facts, may_go=may_go, barred={}
    )
    found = way.settled(room)
    return {
        each.name: [plan.host for plan in each.then] if each.then is not None else None for each in found.goes
    }


def test_it_takes_the_place_of_one_that_is_still_less_important() -> None:
    me, two = machine("me", 30), machine("two", 23)
    room = Room(plan=on(me, 50), goes=(loaded(MODELS[0], on(me)),))
    assert becomes(room, me, two, big=[on(me)], coder=[on(two)]) == {"big": ["two"], "coder": []}
    assert becomes(room, me, two, big=[on(me)]) == {"big": ["two"]}


def test_each_replica_has_machines_of_its_own() -> None:
    me, two = machine("me", 30), machine("two", 30)
    goes = (loaded(MODELS[0], on(me), on(two)),)
    room = Room(plan=on(me, 50), goes=goes)
    assert becomes(room, me, two, machine("six", 30), big=[on(me), on(two)]) == {"big": ["six", "two"]}
    room = Room(plan=on(me, 50), goes=goes)
    assert becomes(room, me, two, big=[on(me), on(two)]) == {"big": ["two"]}


def test_what_goes_since_it_is_idle_is_not_planned_anew() -> None:
    me, two = machine("me", 30), machine("two", 23)
    idle = replace(loaded(MODELS[1], on(me)), gives_way=False, idle_since=1)
    assert becomes(Room(plan=on(me, 50), goes=(idle,)), me, two, coder=[on(me)]) == {"coder": None}
