"""What clients wait for a first token, beside what was predicted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mesh_llm.gateway.metrics import Exchange, FirstToken, Meters
from mesh_llm.gateway.upstream import Upstream
from mesh_llm.node.node import Node
from mesh_llm.planning.decide import decide
from mesh_llm.planning.predict import predict
from mesh_llm.planning.speculation import cache_settings
from mesh_llm.report.time_to_first_token import first_token_status
from mesh_llm.status_schema import FirstTokenStatus, PlanStatus, from_document
from mesh_llm.types import ServingPlan
from tests.support.composed import a_node
from tests.support.planning import ENGINE, GB, HELD, model, settings, speed

HERE = "http://127.0.0.1:4000"
PLAN = from_document(PlanStatus, {"predicted_first_token_s": 0.81})


def waited(measured_s: float | None, tokens: int | None, predicted_s: float | None) -> FirstTokenStatus:
    return FirstTokenStatus(measured_s=measured_s, prompt_tokens=tokens, predicted_s=predicted_s)


def finished(meters: Meters, *, engine: str = HERE, waited_s: float, prompt_tokens: int | None) -> None:
    meters._in_flight.inc()
    exchange = Exchange(method="POST", path="/v1/chat/completions", started_s=100.0)
    exchange.first_event_s, exchange.events = 100.0 + waited_s, 3
    exchange.engine, exchange.prompt_tokens = engine, prompt_tokens
    meters.finish(exchange, status=200)


def test_the_last_request_counts_also_one_that_is_under_way() -> None:
    meters = Meters()
    assert meters.last_first_token() is None
    finished(meters, waited_s=0.5, prompt_tokens=33)
    assert meters.last_first_token() == FirstToken(engine=HERE, seconds=0.5, prompt_tokens=33)

    for waited_s in (0.0, 0.25):
        under_way = Exchange(method="POST", path="/v1/completions", engine=HERE, started_s=200.0)
        under_way.first_event_s = 200.0 + waited_s if waited_s else 0.0
        meters._under_way.add(under_way)

    assert meters.last_first_token() == FirstToken(engine=HERE, seconds=0.25, prompt_tokens=None)
    # The curves get all of them, whoever has asked before.
    assert meters.take_first_tokens_s() == [0.5, 0.25]


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """It serves alone."""
    node = a_node(tmp_path)
    facts, agreed = model(), settings()
    node.mesh.publish(
        engine=ENGINE,
        machine="m1",
        memory_bytes=64 * GB,
        machine_memory_bytes=64 * GB,
        speed=speed(40),
        models=(HELD,),
    )
    node.mesh.membership.set(agreed, node.identity, now=time.time())
    plan = decide(node.mesh.snapshot(), facts, agreed, current=None)
    node.mesh.publish(serving=ServingPlan(epoch=1, plan=plan))
    monkeypatch.setattr(node.models.default.engines, "upstream", lambda: Upstream(url=HERE, key=""))
    monkeypatch.setattr(node.model_files, "facts", lambda fingerprint: facts)
    return node


async def test_the_prediction_is_for_a_prompt_as_long_as_the_last_one(node: Node) -> None:
    finished(node._gateway._meters, waited_s=0.5, prompt_tokens=100)

    found = first_token_status(node.view, PLAN)

    alone = node.mesh.snapshot()
    cache = cache_settings(model(), settings(), 4096)
    stages = node.mesh.serving()
    assert stages
    expected = predict(
        model(), stages[1].plan.stages, alone, host=node.mesh.me, settings=cache, prompt_tokens=100
    )
    assert expected
    assert (found.measured_s, found.prompt_tokens) == (0.5, 100)
    assert found.predicted_s == pytest.approx(expected.first_token_s, abs=0.001)


async def test_before_there_is_one_it_is_what_plans_are_compared_by(node: Node) -> None:
    assert first_token_status(node.view, PLAN) == waited(None, 512, 0.81)
    assert first_token_status(node.view, None).predicted_s is None


async def test_what_another_engine_took_says_nothing_of_this_one(node: Node) -> None:
    finished(node._gateway._meters, engine="http://127.0.0.1:4001", waited_s=0.5, prompt_tokens=100)

    assert first_token_status(node.view, PLAN).measured_s is None


async def test_a_prompt_of_unknown_length_and_a_model_that_is_not_here(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(node._gateway._meters, waited_s=0.5, prompt_tokens=None)
    unknown = first_token_status(node.view, PLAN)
    finished(node._gateway._meters, waited_s=0.25, prompt_tokens=100)
    monkeypatch.setattr(node.model_files, "facts", lambda fingerprint: None)
    elsewhere = first_token_status(node.view, PLAN)

    assert unknown == waited(0.5, None, None)
    assert elsewhere == waited(0.25, 100, None)
