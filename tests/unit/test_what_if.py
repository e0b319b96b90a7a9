"""`mesh-llm plan` on a mesh that serves models already: what fits beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.membership.member import Member, Standing, serving_among
from mesh_llm.mesh_settings import as_one
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands
from mesh_llm.planning.decide import decide
from mesh_llm.planning.experience import Experience
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.report import what_if
from mesh_llm.report.what_if import LookedAt
from mesh_llm.types import Fingerprint, ServingPlan
from tests.support import planning

CODER = planning.model(files=(Path("coder.gguf"),), fingerprint=Fingerprint("c" * 64))
WORDS = planning.model(files=(Path("words.gguf"),), fingerprint=Fingerprint("e" * 64))
BIG = planning.settings()
BESIDE = replace(as_one(BIG), model="coder", alias="coder", fingerprint=CODER.fingerprint)

OTHER = planning.node("two", 23, engine="another")
"""Takes no part in splits."""


class View:
    """One node with so many gigabytes, which serves the big model and, beside it, those of `others`.

    Of `idle` nodes each has the files, and serves nothing.
    """

    def __init__(self, gb: float, *others: Any, idle: Sequence[Candidate] = (), in_force: Any = BIG) -> None:
        self.in_force = replace(in_force, others=others)
        held = tuple(replace(planning.HELD, fingerprint=each.fingerprint) for each in self.in_force.models)
        node = planning.node("me", gb, models=held)
        self.plans = {
            each.fingerprint: decide(
                planning.mesh(node), planning.model(fingerprint=each.fingerprint), each, current=None
            )
            for each in self.in_force.models
        }
        served = [
            ServingPlan(epoch=epoch, plan=plan, fingerprint=fingerprint)
            for epoch, (fingerprint, plan) in enumerate(self.plans.items())
        ]
        idle = [replace(each, facts=replace(each.facts, models=held)) for each in idle]
        serving = replace(node, facts=replace(node.facts, also_serving=tuple(served)))
        self.nodes = planning.mesh(serving, *idle)
        self.id = "me"
        self.config = NodeConfig(home=Path("home"))
        self.mesh = self.model_files = self
        demands = Demands(cast(Mesh, self), on_change=lambda: None, facts=lambda each: self.facts(each))
        self.others_loaded, self.settled = demands.others_loaded, demands.settled
        self.models = lambda: [
            SimpleNamespace(settings=lambda each=each: each, hosting=SimpleNamespace(plan=plan))
            for each, plan in zip(self.in_force.models, self.plans.values(), strict=True)
        ]

    def settings(self) -> Any:
        return self.in_force

    def snapshot(self) -> Any:
        return self.nodes

    def name_of(self, node: str) -> str:
        return node

    def unready(self) -> Any:
        return {}

    def alive(self) -> Any:
        return [
            Member(
                id=each.id, standing=Standing.ALIVE, incarnation=1, facts=each.facts, rtt_s=None,
                connected=True, via=(), since=0.0,
            )
            for each in self.nodes.nodes
        ]  # fmt: skip

    def replicas(self, fingerprint: Fingerprint) -> Any:
        return serving_among(self.alive(), self.in_force, fingerprint)

    def serving(self, fingerprint: Fingerprint) -> Any:
        return next(iter(self.replicas(fingerprint).values()), None)

    def facts(self, fingerprint: Fingerprint) -> Any:
        return planning.model(fingerprint=fingerprint)

    def experience(self, plan: Any) -> Experience:
        return Experience()


async def asked(monkeypatch: pytest.MonkeyPatch, view: Any, **wishes: Any) -> dict[str, Any]:
    async def named(*of: Any) -> LookedAt:
        return LookedAt(facts=WORDS, here=False)

    monkeypatch.setattr(what_if, "named_model", named)
    return await what_if.over_mesh(view, wishes)


async def test_a_model_is_planned_beside_those_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await asked(monkeypatch, View(50), model="words", context=4096, slots=1)
    assert found["plan"]["mode"] == "solo"
    assert found["notes"] == ["planned beside big, which holds 21.6 GB"]

    found = await asked(monkeypatch, View(30), model="words", context=4096, slots=1)
    assert found["plan"]["mode"] == "waiting"
    assert found["notes"] == ["planned beside big, which holds 21.6 GB; without it, this model would fit"]

    found = await asked(monkeypatch, View(50, BESIDE), model="words", context=4096, slots=1)
    assert found["plan"]["mode"] == "waiting"
    assert found["notes"] == [
        "planned beside big and coder, which hold 43.2 GB; without them, this model would fit"
    ]
    found = await asked(monkeypatch, View(10), model="words", context=4096, slots=1)
    assert found["notes"] == [], "nothing is served there"


async def test_a_model_that_is_not_served_has_no_options_of_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mesh-llm load would serve it."""
    found = await asked(monkeypatch, View(99), model="words")
    assert (found["model"]["name"], found["model"]["slots"]) == ("words", 4)
    assert found["model"]["context"] > 4096


async def test_a_served_model_is_planned_in_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(50, replace(BESIDE, slots=2))
    found = await asked(monkeypatch, view, model="coder")
    assert (found["plan"]["mode"], found["model"]["slots"]) == ("solo", 2)
    assert found["assumed"] == []
    assert found["notes"] == ["planned beside big, which holds 21.6 GB"]
    # With more slots than there is memory for, beside the other one.
    found = await asked(monkeypatch, view, model="coder", context=32768, slots=16)
    assert found["plan"]["mode"] == "waiting"
    found = await asked(monkeypatch, View(50), slots=2)
    assert (found["plan"]["mode"], found["model"]["slots"], found["notes"]) == ("solo", 2, [])


async def test_a_more_important_model_takes_the_place_of_others_at_a_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The least important goes first, and no more of them than necessary."""
    view = View(50, replace(BESIDE, priority=-1))
    weights = sum(stage.weight_bytes for stage in view.plans[CODER.fingerprint].stages)
    found = await asked(monkeypatch, view, model="words", context=4096, slots=1)
    assert (found["plan"]["mode"], found["plan"]["host"]) == ("solo", "me")
    assert found["notes"] == [
        f"coder goes to make room for it; {weights / 1e9:.1f} GB to read again when it comes back",
        "planned beside big, which holds 21.6 GB",
    ]
    found = await asked(monkeypatch, view, model="words", context=32768, slots=4, priority=1)
    assert found["plan"]["mode"] == "solo"
    assert found["notes"] == [
        f"coder and big go to make room for it; {2 * weights / 1e9:.1f} GB to read again when they come back"
    ]


async def test_what_gives_way_moves_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine is too small for the model that needs the room."""
    view = View(30, idle=[OTHER])
    wish = {"model": "words", "context": 32768, "slots": 1, "priority": 1}
    found = await asked(monkeypatch, view, **wish)
    assert (found["plan"]["mode"], found["plan"]["host"]) == ("solo", "me")
    assert found["notes"] == ["big moves to two to make room for it; 20.0 GB to read there"]


async def test_what_gives_way_goes_where_its_file_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(30, idle=[OTHER])
    monkeypatch.setattr(view, "facts", lambda fingerprint: None if fingerprint == BIG.fingerprint else WORDS)
    found = await asked(monkeypatch, view, model="words", context=32768, slots=1, priority=1)
    assert found["notes"] == ["big makes room for it; 20.0 GB to read again"]


async def test_those_that_give_way_are_planned_as_the_mesh_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more important one has the other machine; the other one waits."""
    view = View(50, replace(BESIDE, priority=-1), idle=[OTHER])
    found = await asked(monkeypatch, view, model="words", context=32768, slots=4, priority=1)
    assert found["notes"] == [
        "coder goes to make room for it; 20.0 GB to read again when it comes back; "
        "big moves to two to make room for it; 20.0 GB to read there"
    ]


async def test_what_takes_all_memory_stays_with_less_context(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(46, in_force=replace(BIG, context=None))
    found = await asked(monkeypatch, view, model="words", context=4096, slots=1, priority=1)
    assert found["notes"] == [
        "big is loaded anew with 20992 tokens of context to make room for it; nothing new to read"
    ]


async def test_a_model_on_demand_that_answers_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(50, replace(BESIDE, on_demand=True))
    found = await asked(monkeypatch, view, model="words", context=4096, slots=1)
    assert found["plan"]["mode"] == "waiting"
    assert found["notes"][0].startswith("it waits for the memory of coder, which is in use")
