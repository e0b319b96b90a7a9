"""What a plan has shown, and what follows for the next prediction of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.planning.decide import decide
from mesh_llm.planning.experience import KEPT, LEAST_WITHIN, Experience, corrected, plan_key
from mesh_llm.report.experience_file import ExperienceFile
from mesh_llm.types import Fingerprint, Prediction
from tests.support.planning import FINGERPRINT, mesh, model, node, settings

TOLD = Prediction(
    tok_s=60.0, first_token_s=0.1, prompt_tok_s=900.0, tok_s_within=0.25, first_token_within=0.25
)


def test_nothing_seen_changes_nothing() -> None:
    assert corrected(TOLD, Experience()) == TOLD


def test_what_was_seen_is_foretold() -> None:
    seen = Experience().with_token(3.0).with_first_token(9.0)

    found = corrected(TOLD, seen)

    assert found.tok_s == pytest.approx(20.0)
    assert found.first_token_s == pytest.approx(0.9)
    assert found.prompt_tok_s == pytest.approx(100.0)
    assert found.tok_s_within == found.first_token_within == LEAST_WITHIN


def test_one_disturbed_answer_does_not_count_for_much_and_scatter_is_told() -> None:
    steady, scattered = Experience(), Experience()
    for share in (2.0, 2.0, 2.1, 8.0, 2.0):
        steady = steady.with_token(share)
    for share in (1.0, 2.0, 3.0, 1.2, 2.8):
        scattered = scattered.with_token(share)

    assert corrected(TOLD, steady).tok_s == pytest.approx(30.0)
    assert corrected(TOLD, steady).tok_s_within == LEAST_WITHIN
    assert corrected(TOLD, scattered).tok_s_within > 0.5


def test_only_the_latest_and_only_what_can_be() -> None:
    seen = Experience()
    for share in (*range(1, 15), 0.0, 1e9, float("nan")):
        seen = seen.with_token(float(share))

    assert seen.token == tuple(float(share) for share in range(15 - KEPT, 15))


def test_plans_are_known_by_their_machines_and_cuts() -> None:
    facts, wishes = model(), settings()
    here = mesh(node("a", 64))
    plan = decide(here, facts, wishes, current=None)
    renamed = mesh(node("b", 64, machine="machine of a"))
    other = decide(renamed, facts, wishes, current=None)

    key = plan_key(plan, here, FINGERPRINT)

    assert plan_key(other, renamed, FINGERPRINT) == key
    assert plan_key(plan, mesh(node("a", 64, machine="another")), FINGERPRINT) != key
    assert plan_key(plan, mesh(node("a", 64, threads=3)), FINGERPRINT) != key
    assert plan_key(plan, mesh(node("a", 64, cpu_library="built here")), FINGERPRINT) != key
    assert plan_key(plan, here, Fingerprint("0" * 64)) != key
    moved = replace(plan, stages=tuple(replace(stage, last=3) for stage in plan.stages))
    assert plan_key(moved, here, FINGERPRINT) != key


def test_it_is_kept_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "experience.json"
    known = ExperienceFile(file)
    for number in range(200):
        known.learn(f"plan {number}", Experience().with_token(1.5).with_first_token(0.5))

    again = ExperienceFile(file)

    assert again.of("plan 199") == Experience(token=(1.5,), first_token=(0.5,))
    assert again.of("plan 0") == Experience()
    assert file.stat().st_size < 16 << 10
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"plans": 3}', '{"plans": {"p": 3}}', '{"plans": {"p": {"token": ["x", 1e999, -1.0]}}}'],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "experience.json"
    file.write_text(text)

    assert ExperienceFile(file).of("p") == Experience()


def test_where_it_cannot_be_kept_it_counts_for_now(tmp_path: Path) -> None:
    known = ExperienceFile(tmp_path / "missing" / "experience.json")
    known.learn("p", Experience().with_token(2.0))

    assert known.of("p").token == (2.0,)
