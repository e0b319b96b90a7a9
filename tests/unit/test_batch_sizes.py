"""How many tokens of a prompt are taken at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_llm.planning.batch_sizes import (
    BESIDE,
    BESIDE_SPLIT,
    LARGEST,
    SMALLEST,
    Batches,
    batches,
    micro_batch,
)
from mesh_llm.planning.decide import decide
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import ModelFacts, Plan, Prediction
from tests.support.planning import model, node, settings


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return model()


def solo(facts: ModelFacts) -> Plan:
    return decide(Snapshot(nodes=(node("a", 100),)), facts, settings(), current=None, barred={})


def split(facts: ModelFacts) -> Plan:
    links = {"a": 0.5, "b": 0.5}
    nodes = (node("a", 14, links=links), node("b", 14, links=links))
    return decide(Snapshot(nodes=nodes), facts, settings(split=True), current=None, barred={})


def at(plan: Plan, tokens_per_s: float) -> Plan:
    """The plan, foretold to read prompts at that speed."""
    return replace(plan, predicted=Prediction(tok_s=10.0, first_token_s=1.0, prompt_tok_s=tokens_per_s))


@pytest.mark.parametrize(
    ("tokens_per_s", "step", "micro"),
    [
        (10, SMALLEST, SMALLEST),
        (256, SMALLEST, SMALLEST),
        (640, 128, 128),
        (1000, 192, 192),
        (2048, 512, 512),
        (4000, 960, 512),
        (1e6, LARGEST, 512),
    ],
)
def test_a_step_takes_a_quarter_of_a_second(
    facts: ModelFacts, tokens_per_s: float, step: int, micro: int
) -> None:
    assert batches(at(solo(facts), tokens_per_s), facts) == Batches(step=step, micro=micro, beside=BESIDE)


def test_a_split_plan_computes_less_at_once(facts: ModelFacts) -> None:
    plan = split(facts)
    assert plan.workers
    assert batches(at(plan, 4000), facts) == Batches(step=960, micro=128, beside=BESIDE_SPLIT)
    assert batches(at(plan, 40000), facts) == Batches(step=2048, micro=128, beside=BESIDE_SPLIT)
    assert batches(at(plan, 300), facts) == Batches(step=512, micro=64, beside=BESIDE_SPLIT)


def test_a_speed_that_nobody_knows_is_taken_for_an_ordinary_one(facts: ModelFacts) -> None:
    assert batches(replace(solo(facts), predicted=None), facts) == Batches(step=512, micro=512, beside=BESIDE)


def test_images_are_not_cut(facts: ModelFacts) -> None:
    assert batches(at(solo(facts), 10), facts, images=True) == Batches(step=512, micro=512)
    assert batches(at(split(facts), 10), facts, images=True) == Batches(step=512, micro=512)


@pytest.mark.parametrize(("trained", "size"), [(256, 512), (512, 512), (1024, 1024), (32_768, 2048)])
def test_what_is_embedded_goes_through_whole(facts: ModelFacts, trained: int, size: int) -> None:
    encoder = replace(facts, encodes=True, context_trained=trained)
    assert batches(at(solo(facts), 10), encoder, whole=True) == Batches(step=size, micro=size)
    assert micro_batch(encoder) == size


def test_a_model_that_writes_embeds_no_more_than_is_counted_for(facts: ModelFacts) -> None:
    assert batches(at(solo(facts), 10), facts, whole=True) == Batches(step=512, micro=512)
