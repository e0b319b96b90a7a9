"""Every documented route, asked right and wrong: what is documented comes back, or that API's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.node import NodeProcess
from tests.support.pairs import Pair

DOCUMENT = schemathesis.openapi.from_path(Path(__file__).with_name("openapi.json"))
OPERATIONS: list[Any] = [found.ok() for found in DOCUMENT.get_all_operations() if isinstance(found, Ok)]
TAKING = [operation for operation in OPERATIONS if operation.method == "post"]
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
EXAMPLES = 6
ANSWER_S = 100.0
"""For one answer; on a quiet machine the model has none that takes longer than a second."""
OURS = {"internal_error", "engine_lost", "engine_silent", "not_serving"}
"""Codes with which a node says that it failed. The engine's own are numbers."""
MALFORMED = {
    "nothing": b"",
    "half": b'{"messages": [',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "deep": b"[" * 200 + b"]" * 200,
    "twice": b'{"prompt": 1, "prompt": 2, "messages": 3, "messages": 4}',
}


@pytest.fixture
def node(tiny_pair: Pair, way: str) -> NodeProcess:
    node: NodeProcess = getattr(tiny_pair, way)
    return node


def check_error(status: int, document: Any) -> None:
    assert status >= 400
    error = document["error"]
    assert error["message"]
    assert error["type"]
    # Anthropic's have no code.
    assert error.get("code") not in OURS, error


def check(operation: Any, mode: schemathesis.GenerationMode, node: NodeProcess) -> None:
    # The same questions in each run, and nothing remembered from one to the next.
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        response = case.call(base_url=node.url, timeout=ANSWER_S)
        case.validate_response(response, checks=CHECKS)
        if response.status_code != 200:
            check_error(response.status_code, response.json())

    ask()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_a_right_question(operation: Any, node: NodeProcess) -> None:
    check(operation, RIGHT, node)


@pytest.mark.parametrize("operation", TAKING, ids=lambda operation: operation.path)
def test_a_wrong_question(operation: Any, node: NodeProcess) -> None:
    check(operation, WRONG, node)


@pytest.mark.parametrize("operation", TAKING, ids=lambda operation: operation.path)
def test_a_malformed_question(operation: Any, node: NodeProcess) -> None:
    for name, body in MALFORMED.items():
        reply = node.ask(operation.path, body)

        assert reply.headers["Content-Type"].startswith("application/json"), name
        if reply.status != 200:
            check_error(reply.status, json.loads(reply.body))


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/", "/v1/../v1/models", "/%00", "/v1/models/any"])
def test_another_method_or_path(method: str, path: str, node: NodeProcess) -> None:
    connection = node.connect()
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()

    if response.status != 200:
        check_error(response.status, json.loads(body))
