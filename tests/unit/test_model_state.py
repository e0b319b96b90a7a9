"""What a node says of a model whose file is not here yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.node.model_state import ModelState
from mesh_llm.node.node_state import NodeState
from mesh_llm.types import State

THEIRS = SimpleNamespace(fingerprint="theirs")
"""A plan that is being brought up."""


class Model:
    """Which no engine serves."""

    def __init__(self) -> None:
        self.upstream: object = None
        self.published: Any = None
        unused: Any = None
        self.mesh = SimpleNamespace(
            others_reason=str,
            name_of=str,
            facts=SimpleNamespace(resting=False, state=State.WAITING),
            has_company=lambda: True,
        )
        self.plans = SimpleNamespace(serving=lambda: self.published, is_default=True)
        engines: Any = SimpleNamespace(upstream=lambda: self.upstream, names=("ours",))
        self.demand = SimpleNamespace(rests=False, settings=None, reason="")
        announcements: Any = SimpleNamespace(say=lambda kind, text: None)
        self.state = ModelState(
            cast(Any, self.mesh),
            cast(Any, self.plans),
            engines,
            unused,
            announcements,
            cast(Any, self.demand),
            advice=str,
            on_change=lambda: None,
        )

    def seen(self) -> tuple[State, str]:
        self.state.reflect()
        return self.state.value, self.state.reason


def test_a_model_whose_file_is_being_fetched_is_loading_for_as_long_as_that_takes() -> None:
    model = Model()
    model.state.on_supply(State.LOADING, "ours is being fetched from the mesh")
    assert model.seen() == (State.LOADING, "ours is being fetched from the mesh")
    # What hosting says is about another one, or about nothing.
    model.state.on_hosting(State.WAITING, "no node has the model")
    assert model.seen() == (State.LOADING, "ours is being fetched from the mesh")

    model.state.on_supplied()
    assert model.seen() == (State.WAITING, "no node has the model")


@pytest.mark.parametrize(("starting", "state"), [((), State.WAITING), ((THEIRS,), State.LOADING)])
def test_why_a_model_does_not_serve_is_heard_from_others(starting: tuple[Any, ...], state: State) -> None:
    """From those that have its file; the default one's reason is none of its own."""
    model = Model()
    model.plans.is_default, model.plans.fingerprint = False, "theirs"
    model.mesh.others_reason = lambda: "the default model is too large"
    model.mesh.alive = lambda: [SimpleNamespace(facts=SimpleNamespace(starting=starting))]
    model.demand.word = lambda: None
    assert model.seen() == (state, "no node of the mesh serves yet")
    model.demand.word = lambda: SimpleNamespace(reason="need 3 GB, have 2 GB", hopeless=False)
    assert model.seen() == (state, "need 3 GB, have 2 GB")


def test_a_model_that_nobody_has_is_waited_for_and_not_loading() -> None:
    model = Model()
    model.state.on_supply(State.WAITING, "ours could not be fetched: no member has it; trying again")
    assert model.seen() == (
        State.WAITING,
        "ours could not be fetched: no member has it; trying again",
    )


@pytest.mark.parametrize("reached", [True, False])
def test_a_model_that_others_serve_is_told_by_what_they_do(reached: bool) -> None:
    model = Model()
    model.state.on_supply(State.LOADING, "ours is being fetched from the mesh")
    model.published = ("desk", None)
    model.upstream = object() if reached else None
    assert model.seen() == ((State.SERVING, "") if reached else (State.LOADING, "desk is about to serve"))


def test_a_node_that_takes_part_does_not_start_again_while_it_fetches_its_default_model() -> None:
    """All its models, and the mesh, took it for one that starts."""
    published: list[dict[str, Any]] = []
    mesh: Any = SimpleNamespace(publish=lambda **facts: published.append(facts))
    default = Model().state
    node = NodeState(mesh, models=lambda: [default], announce_api=lambda: None)
    node.start("ours is being downloaded")
    assert (node.value, node.reason) == (State.STARTING, "ours is being downloaded")
    node.take_part()
    default.on_supply(State.LOADING, "another is being fetched from the mesh")
    node.start("another is being fetched from the mesh")
    node.reflect()

    assert (node.value, node.reason) == (State.LOADING, "another is being fetched from the mesh")
    assert State.STARTING not in [facts["state"] for facts in published]
