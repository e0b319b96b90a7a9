"""Plans with nodes that have yet to fetch their layers: workers, never hosts, and never in the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.fact_documents import facts_from_document, facts_to_document
from mesh_llm.planning.decide import decide
from mesh_llm.planning.eligibility import without_layers
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import Fingerprint, HeldPart, HostingMode, Mode, NodeFacts, Role
from tests.support.planning import FINGERPRINT, layers, mesh, model, node, running, settings


def lacking(
    name: str, gb: float = 12, *, spans: tuple[tuple[int, int], ...] = (), **options: Any
) -> Candidate:
    return node(name, gb, models=(), part=HeldPart(fingerprint=FINGERPRINT, spans=spans), **options)


def test_a_node_without_the_file_works_for_one_that_has_it() -> None:
    # The larger and faster one would host, if it could.
    plan = decide(mesh(node("a", 14), lacking("b", 20, gb_s=80)), model(), settings(), current=None)
    assert (plan.mode, plan.host) == (Mode.SPLIT, "a")
    assert set(layers(plan)) == {"a", "b"}


def test_it_is_no_host_even_where_all_would_fit_on_it() -> None:
    plan = decide(mesh(node("a", 30), lacking("b", 90)), model(), settings(), current=None)
    assert (plan.mode, plan.host) == (Mode.SOLO, "a")
    plan = decide(mesh(lacking("b", 90)), model(), settings(), current=None)
    assert (plan.mode, plan.reason) == (Mode.WAITING, "no node here has all of the model big")
    wishes = settings(layers=(("b", 0, 10), ("a", 10, 40)))
    plan = decide(mesh(node("a", 30), lacking("b", 30)), model(), wishes, current=None)
    assert plan.mode is Mode.WAITING
    assert plan.reason == "--layers: no node that may host has the first layers, or no layers at all"


def test_a_plan_whose_host_has_lost_the_file_is_given_up() -> None:
    both = decide(mesh(node("a", 14), node("b", 13)), model(), settings(split=True), current=None)
    assert both.host == "a"
    after = decide(
        mesh(lacking("a", 14), node("b", 13)), model(), settings(split=True), current=running(both)
    )
    assert after.host == "b"


def test_layers_of_another_model_count_for_nothing() -> None:
    other = HeldPart(fingerprint=Fingerprint("0" * 64), spans=((0, 40),))
    plan = decide(
        mesh(node("a", 30), node("b", 30, models=(), part=other)), model(), settings(), current=None
    )
    assert [(each.node, each.reason) for each in plan.excluded] == [("b", "no such model file")]


def test_who_has_yet_to_fetch_everything() -> None:
    here = mesh(node("a"), lacking("b"), lacking("c", spans=((3, 9),)), node("d", models=()))
    assert without_layers(here, model()) == {"b": "has yet to fetch its layers"}
    assert without_layers(mesh(lacking("e", hosting=HostingMode.NEVER)), model()) == {
        "e": "has yet to fetch its layers"
    }


PLAIN = NodeFacts(name="n", role=Role.NODE, version="1")


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((0, 4), (9, 80))])
def test_a_part_is_told_and_read(spans: tuple[tuple[int, int], ...]) -> None:
    facts = NodeFacts(
        name="n", role=Role.NODE, version="1", part=HeldPart(fingerprint=FINGERPRINT, spans=spans)
    )
    assert facts_from_document(json.loads(json.dumps(facts_to_document(facts)))) == facts


@pytest.mark.parametrize(
    "part",
    [
        *[5, [], {}, {"fingerprint": 7}, {"fingerprint": "a\x1bb"}],
        {"fingerprint": "f", "spans": 3},
        {"fingerprint": "f", "spans": [[0, 1]] * 65},
        *(
            {"fingerprint": "f", "spans": [span]}
            for span in ([1, 1], [3, 2], [-1, 2], [0, 1 << 20], [0], "ab", [0.5, 2])
        ),
    ],
)
def test_an_impossible_part_is_refused(part: object) -> None:
    with pytest.raises(MalformedMessage):
        facts_from_document({**facts_to_document(PLAIN), "part": part})
