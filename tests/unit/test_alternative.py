"""The kind of plan that was not chosen."""

from __future__ import annotations

from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.alternative import Alternative, alternative
from mesh_llm.planning.decide import decide
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Mode, Plan
from tests.support.planning import counts, mesh, model, node, settings


def both(snapshot: Snapshot, wanted: MeshSettings) -> tuple[Plan, Alternative | None]:
    chosen = decide(snapshot, model(), wanted, current=None)
    return chosen, alternative(snapshot, model(), wanted, chosen, barred={})


def test_beside_a_solo_plan_stands_the_split() -> None:
    chosen, other = both(mesh(node("a", 64), node("b", 64)), settings())

    assert chosen.mode is Mode.SOLO
    assert other is not None
    assert other.mode is Mode.SPLIT
    assert other.plan is not None
    assert set(counts(other.plan)) == {"a", "b"}
    assert chosen.predicted is not None
    assert other.plan.predicted is not None
    assert chosen.predicted.tok_s > other.plan.predicted.tok_s


def test_beside_a_split_that_somebody_wanted_stands_the_solo_plan() -> None:
    chosen, other = both(mesh(node("a", 64), node("b", 64)), settings(tensor_split=(1.0, 1.0)))

    assert chosen.mode is Mode.SPLIT
    assert other is not None
    assert other.plan is not None
    assert other.plan.mode is Mode.SOLO
    assert other.reason == "fits on a alone, the fastest of 2 nodes that hold it"


def test_a_model_too_large_for_one_has_no_solo_plan() -> None:
    chosen, other = both(mesh(node("a", 15), node("b", 15)), settings())

    assert chosen.mode is Mode.SPLIT
    assert other == Alternative(mode=Mode.SOLO, plan=None, reason="no node holds it alone; 2 nodes do")


def test_one_node_has_nobody_to_split_with() -> None:
    _, other = both(mesh(node("a", 64)), settings())

    assert other == Alternative(
        mode=Mode.SPLIT,
        plan=None,
        reason="fits on a alone; --split finds no other node that can take part",
    )


def test_nothing_stands_beside_no_plan() -> None:
    chosen, other = both(mesh(node("a", 4)), settings())

    assert chosen.mode is Mode.WAITING
    assert other is None
