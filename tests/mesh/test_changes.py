"""Nodes that come and go while answers stream, and meshes that are started again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.support.command import mesh_llm
from tests.support.mesh import HEAL_S, SPARE_EPOCHS, MeshProcesses
from tests.support.series import Scrape
from tests.support.waiting import until

LONG: dict[str, Any] = {
    "prompt": "1 2 3 4 5 6 7",
    "temperature": 0,
    "ignore_eos": True,
    "cache_prompt": False,
}
"""Answered for seconds, in which the mesh changes."""
BEGINNING = 80
"""Tokens."""
LONGEST = 1800
"""The same, of an answer that the context has room for."""


def beginning(mesh: MeshProcesses, through: str) -> str:
    """How every answer to `LONG` begins."""
    reply = mesh.nodes[through].ask("/v1/completions", {**LONG, "max_tokens": BEGINNING})
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def streamed_while(
    mesh: MeshProcesses, through: str, change: Callable[[], object], *, tokens: int = 300
) -> str:
    """The text of an answer that has begun when `change` happens; the whole of it, or the test fails."""
    question = {**LONG, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    with mesh.nodes[through].stream("/v1/completions", question) as stream:
        chunks = stream.data()
        first = next(chunks)
        change()
        *rest, last = chunks
    assert last == "[DONE]", f"cut after {len(rest)} chunks: {last}\n{mesh.told()}"
    parts = [json.loads(chunk) for chunk in (first, *rest)]
    assert parts[-1]["usage"]["completion_tokens"] == tokens
    return "".join(choice["text"] for part in parts for choice in part["choices"])


@pytest.mark.full
def test_node_that_joins_gets_layers_and_cuts_no_answer(mesh: MeshProcesses) -> None:
    mesh.create("one", "--split")
    mesh.serving()
    began = time.monotonic()
    mesh.join("two")
    before, text = mesh.serving(), mesh.chat()
    join_s = time.monotonic() - began
    began = time.monotonic()
    expected = beginning(mesh, before.workers[0])
    # As long as the next one needs to join, and half as long again.
    tokens = min(round(1.5 * join_s * BEGINNING / (time.monotonic() - began)), LONGEST)

    got, overlapped = streamed_while_three_joins(mesh, mesh.join, tokens=tokens)
    for _ in range(2):
        if overlapped:
            break
        # It took far longer to join than the one before: again, with all the time that there is.
        mesh.stop("three")
        before = mesh.serving()
        got, overlapped = streamed_while_three_joins(mesh, mesh.restart, tokens=LONGEST)
    after = mesh.serving()

    assert overlapped, "the answer ended before the new plan served: it proves nothing"
    assert got.startswith(expected)
    assert len(after.stages) == 3
    assert before.epoch < after.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert mesh.chat() == text
    until(lambda: mesh.engines() == [after.engine], within_s=40, what="the replaced engine ends")


def streamed_while_three_joins(
    mesh: MeshProcesses, start: Callable[[str], object], *, tokens: int
) -> tuple[str, bool]:
    """The text of an answer, and whether it was still under way when the plan with `three` served."""
    before = mesh.serving()
    engines: list[int] = []

    def join() -> None:
        start("three")
        mesh.serving(above=before.epoch)
        engines.extend(mesh.engines())

    text = streamed_while(mesh, before.workers[0], join, tokens=tokens)
    return text, len(engines) == 2


@pytest.mark.full
def test_node_that_is_not_needed_changes_nothing(mesh: MeshProcesses) -> None:
    mesh.create("one")

    # Several tries: a host that stands still for seconds is taken for dead, and its plan replaced.
    for name in ("two", "three", "four"):
        before = mesh.serving()
        mesh.join(name)
        mesh.serving(on=["one"])
        mesh.kill(name)
        until(partial(mesh.nobody_lists, name), within_s=HEAL_S, what="the loss is known")
        after = mesh.serving(on=["one"])
        if after == before:
            break

    assert after == before


@pytest.mark.full
def test_worker_stops_while_an_answer_streams(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    leaving, through = before.workers
    expected = beginning(trio, through)

    got = streamed_while(trio, through, lambda: trio.stop(leaving))
    after = trio.serving()

    assert got.startswith(expected)
    assert leaving not in {name for name, _, _ in after.stages}
    assert before.epoch < after.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_host_stops_while_an_answer_streams_through_another_node(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    through = before.workers[0]
    expected = beginning(trio, through)

    got = streamed_while(trio, through, lambda: trio.stop(before.host))
    after = trio.serving()

    assert got.startswith(expected)
    assert after.host in before.workers
    assert before.epoch < after.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_node_that_leaves_is_forgotten_and_forgets(mesh: MeshProcesses) -> None:
    mesh.create("one", "--split")
    mesh.join("two")
    before, text = mesh.serving(), mesh.chat()

    node = mesh.nodes.pop("two")
    ended = mesh_llm("leave", "--home", node.home)
    until(lambda: mesh.nobody_lists("two"), within_s=HEAL_S, what="it is known to have left")
    seen = Scrape(mesh.nodes["one"].ask("/metrics").body)
    after = mesh.serving()

    assert ended.status == 0, ended.stderr
    assert node.wait().status == 0
    # Told when it went: nobody had to miss it.
    assert seen.value("mesh_llm_members", standing="left") == 1
    assert not (node.home / "mesh.json").exists()
    assert after.stages == (("one", 0, 30),)
    assert before.epoch < after.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert mesh.chat() == text


@pytest.mark.full
def test_restarted_in_another_order_without_tokens(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    names = [before.workers[1], before.host, before.workers[0]]

    for name in names:
        trio.kill(name)
    for name in names:
        trio.restart(name)
    after = trio.serving()

    assert sorted(name for name, _, _ in after.stages) == sorted(names)
    assert before.epoch < after.epoch <= before.epoch + 4 + SPARE_EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_two_that_hold_the_model_only_together(mesh: MeshProcesses) -> None:
    mesh.create("one", "--max-memory", "0.12GB")
    plan = mesh.waiting()
    assert plan["have_bytes"] < plan["need_bytes"]

    mesh.join("two", "--max-memory", "0.12GB")
    before, text = mesh.serving(), mesh.chat()
    mesh.kill("two")
    mesh.waiting()

    status = mesh.nodes["one"].status()
    plan, reason = status["plan"], status["node"]["reason"]
    assert 0 < plan["have_bytes"] < plan["need_bytes"]
    need_mb, have_mb = round(plan["need_bytes"] / 1e6), round(plan["have_bytes"] / 1e6)
    assert reason == f"need {need_mb} MB for the model, have {have_mb} MB on 1 node"
    assert mesh.nodes["one"].ask("/v1/chat/completions", {"messages": []}).status == 503
    until(lambda: mesh.engines() == [], within_s=HEAL_S, what="no engine is left")

    mesh.restart("two")
    after = mesh.serving()

    assert before.epoch < after.epoch <= before.epoch + 3 + SPARE_EPOCHS
    assert mesh.chat() == text
    # Said when it began, not over and over.
    assert mesh.nodes["one"].stdout.count("Waiting for more peers") <= 4
