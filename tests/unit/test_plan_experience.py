"""What a node learns from a plan that it hosts, and predicts of it from then on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.gateway.metrics import FirstToken
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.planning.decide import decide
from mesh_llm.planning.experience import Experience, corrected
from mesh_llm.report.plan_experience import PlanExperience, raw_prediction
from mesh_llm.report.view import NodeView
from mesh_llm.types import ModelFacts, Plan, Prediction
from tests.support.planning import mesh, model, node, settings

HERE = mesh(node("a", 64), node("b", 64))
PLAN = decide(HERE, model(), settings(split=True), current=None)


@dataclass
class Seen:
    """What an experience reads of its node."""

    facts: ModelFacts | None = field(default_factory=model)
    token_s: float | None = None
    first: FirstToken | None = None

    @property
    def view(self) -> NodeView:
        view: Any = SimpleNamespace(
            mesh=SimpleNamespace(snapshot=lambda: HERE, settings=settings),
            settings=settings,
            model_files=SimpleNamespace(facts=lambda _: self.facts),
            token_s=lambda _: self.token_s,
            first_token=lambda: self.first,
        )
        return cast(NodeView, view)

    def predicted(self, prompt_tokens: int | None = None) -> Prediction:
        found = raw_prediction(self.view, PLAN, prompt_tokens)
        assert found is not None
        return found


def run_of(plan: Plan) -> PlanRun:
    run: Any = SimpleNamespace(plan=plan)
    return cast(PlanRun, run)


def test_a_plan_that_has_run_is_predicted_by_what_it_showed(tmp_path: Path) -> None:
    seen, file = Seen(), tmp_path / "experience.json"
    known = PlanExperience(seen.view, file)
    first = seen.predicted(100).first_token_s
    seen.token_s = 3 / seen.predicted().tok_s
    seen.first = FirstToken(engine="", seconds=5 * first, prompt_tokens=100)

    known.learn(run_of(PLAN))

    # Kept: the next start of this node knows it, too.
    for each in (known, PlanExperience(seen.view, file)):
        assert each.of(PLAN).token == pytest.approx((3.0,))
        assert each.of(PLAN).first_token == pytest.approx((5.0,))
    assert 1 / corrected(seen.predicted(), known.of(PLAN)).tok_s == pytest.approx(seen.token_s)
    assert corrected(seen.predicted(100), known.of(PLAN)).first_token_s == pytest.approx(5 * first)


def test_what_was_seen_once_counts_once(tmp_path: Path) -> None:
    seen = Seen()
    known, run = PlanExperience(seen.view, tmp_path / "experience.json"), run_of(PLAN)
    for share in (2.0, 2.0, 4.0):
        seen.token_s = share / seen.predicted().tok_s
        known.learn(run)

    assert known.of(PLAN).token == pytest.approx((2.0, 4.0))


def test_a_prediction_beside_a_measurement_leaves_out_what_this_run_shows(tmp_path: Path) -> None:
    seen = Seen()
    known, runs = PlanExperience(seen.view, tmp_path / "experience.json"), (run_of(PLAN), run_of(PLAN))
    for run, share in zip(runs, (2.0, 3.0), strict=True):
        seen.token_s = share / seen.predicted().tok_s
        known.learn(run)

    assert known.before(PLAN).token == pytest.approx((2.0,))
    assert known.of(PLAN).token == pytest.approx((2.0, 3.0))


def test_nothing_is_learned_where_nothing_can_be_predicted(tmp_path: Path) -> None:
    seen = Seen(facts=None, token_s=0.1, first=FirstToken(engine="", seconds=1.0, prompt_tokens=10))
    known = PlanExperience(seen.view, tmp_path / "experience.json")

    known.learn(run_of(PLAN))

    assert known.of(PLAN) == known.before(PLAN) == Experience()
