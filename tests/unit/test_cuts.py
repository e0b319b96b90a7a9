"""Where a model may be cut, and into how many stages."""

from __future__ import annotations

import pytest

from mesh_llm.planning.cuts import MAX_DEVICES, forbidden, furthest_cut, joined_from
from mesh_llm.planning.decide import decide
from mesh_llm.types import ModelFacts, Plan
from tests.support.planning import mesh, model, node, reasons, settings

JOINED = model(joined_layers=12)
"""Layers 28 to 39 stay together."""


def cuts(plan: Plan) -> list[int]:
    return [stage.first for stage in plan.stages]


def test_layers_that_stay_together() -> None:
    assert joined_from(model()) == 40
    assert joined_from(JOINED) == 28
    assert joined_from(model(joined_layers=1)) == 40


@pytest.mark.parametrize(
    ("facts", "reach", "behind", "expected"),
    [
        (model(), 40, 0, 40),
        (model(), 40, 3, 37),
        (model(), 11, 3, 11),
        (JOINED, 40, 0, 40),
        (JOINED, 39, 0, 28),
        (JOINED, 40, 1, 28),
        (JOINED, 40, 3, 26),
        (JOINED, 28, 0, 28),
    ],
)
def test_how_far_a_range_may_go(facts: ModelFacts, reach: int, behind: int, expected: int) -> None:
    assert furthest_cut(facts, reach, behind) == expected


def test_forbidden_cuts_are_told() -> None:
    assert forbidden(model(), [0, 39]) == ""
    assert forbidden(JOINED, [0, 10, 28]) == ""
    sentence = (
        "the model's layers 28-39 share their caches and stay together; it cannot be cut before layer 29"
    )
    assert forbidden(JOINED, [0, 29]) == sentence
    whole = model(joined_layers=40, architecture="graniteswitch")
    assert forbidden(whole, [0]) == "a model of the architecture graniteswitch cannot be split"


@pytest.mark.parametrize("sizes", [(9, 9, 9), (12, 14, 6, 9), (25, 9), (4, 4, 16, 8, 8)], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_no_plan_has_a_forbidden_cut(sizes: tuple[int, ...], split: bool) -> None:
    nodes = [node(chr(97 + index), size) for index, size in enumerate(sizes)]
    plan = decide(mesh(*nodes), JOINED, settings(split=split), current=None)
    assert plan.stages[-1].last == 40
    assert all(cut <= 28 for cut in cuts(plan))


def test_forbidden_cuts_that_a_person_asks_for_are_refused() -> None:
    nodes = node("a", 30), node("b", 30)
    told = settings(layers=(("a", 0, 30), ("b", 30, 40)))
    assert "cannot be cut before layer 30" in decide(mesh(*nodes), JOINED, told, current=None).reason
    ratios = settings(tensor_split=(3.0, 1.0))
    assert "cannot be cut before layer 30" in decide(mesh(*nodes), JOINED, ratios, current=None).reason
    fine = settings(layers=(("a", 0, 28), ("b", 28, 40)))
    assert cuts(decide(mesh(*nodes), JOINED, fine, current=None)) == [0, 28]


def test_a_model_that_is_never_split() -> None:
    whole = model(joined_layers=40)
    small = [node(name, 15) for name in "abc"]
    assert cuts(decide(mesh(*small), whole, settings(), current=None)) == []
    large = [node(name, 40) for name in "ab"]
    assert len(decide(mesh(*large), whole, settings(split=True), current=None).stages) <= 1


def test_no_more_devices_than_the_scheduler_knows() -> None:
    nodes = [node(f"n{index:02d}", 10) for index in range(30)]
    plan = decide(mesh(*nodes), model(), settings(split=True), current=None)
    assert len(plan.stages) == MAX_DEVICES + 1  # the host computes on its CPU
    left_out = set(reasons(plan).values())
    assert left_out == {"at most 15 devices can take part in a plan, the host's GPUs among them"}
    told = settings(tensor_split=(1.0,) * 20)
    assert "at most 15 devices" in decide(mesh(*nodes), model(), told, current=None).reason
    few = [node(f"n{index:02d}", 1.3) for index in range(30)]
    waiting = decide(mesh(*few), model(), settings(), current=None)
    assert "no 16 of them hold it, and more cannot take part in a plan" in waiting.reason
