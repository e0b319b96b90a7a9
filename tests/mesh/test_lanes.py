"""Several engines over the same workers: they answer at the same time, and one dies without the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import mesh_llm
from tests.support.mesh import HEAL_S, MeshProcesses
from tests.support.node import NodeProcess, temporary_home
from tests.support.series import Scrape
from tests.support.waiting import until

LONG = 150
"""Tokens: enough to be under way for a while."""


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[MeshProcesses]:
    """A host and two workers, with two lanes of one slot each.

    What it writes can be read again, and so is the same after a loss.
    """
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        mesh.create("one", "--split", "--lanes", "2", "--no-draft", "--hosting", "prefer")
        mesh.join("two")
        mesh.join("three")
        mesh.serving(within_s=90)
        yield mesh


def lanes(node: NodeProcess) -> list[dict[str, Any]]:
    """Those that answer."""
    engine = node.status()["engine"]
    return [lane for lane in engine["lanes"] if lane["state"] == "ready"]


def until_both(node: NodeProcess) -> list[dict[str, Any]]:
    until(lambda: len(lanes(node)) == 2, within_s=HEAL_S, what="two lanes answer")
    return lanes(node)


def body(number: int, tokens: int = LONG) -> dict[str, Any]:
    prompt = f"Once upon a time there were {number + 3} foxes who"
    return {"prompt": prompt, "temperature": 0, "n_predict": tokens, "ignore_eos": True, "stream": False}


def text(node: NodeProcess, number: int, tokens: int = LONG) -> str:
    reply = node.ask("/completion", body(number, tokens))
    assert reply.status == 200, reply.body
    return str(reply.json()["content"])


@contextmanager
def both_answering(host: NodeProcess) -> Iterator[list[Future[str]]]:
    """An answer of each of two lanes, under way."""
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(text, host, number) for number in range(2)]
        until(lambda: all(lane["requests"] for lane in lanes(host)), within_s=HEAL_S, what="both answer")
        yield answers


@pytest.mark.full
def test_two_lanes_answer_at_once_as_one_does(pair: MeshProcesses) -> None:
    host, guest = pair.nodes["one"], pair.nodes["two"]
    alone = [text(host, number) for number in range(4)]
    until_both(host)

    with ThreadPoolExecutor(4) as clients:
        together = [clients.submit(text, (host, guest)[number % 2], number) for number in range(4)]
        until(
            lambda: [lane["requests"] for lane in lanes(host)] == [1, 1],
            within_s=HEAL_S,
            what="both answer",
        )
        assert [each.result() for each in together] == alone

    status = host.status()
    assert status["plan"]["lanes"] == 2
    assert len({lane["pid"] for lane in status["engine"]["lanes"]}) == 2
    seen = Scrape(host.ask("/metrics").body)
    assert seen.value("mesh_llm_engine_lanes") == 2
    told = float(seen.value("llamacpp:tokens_predicted_total"))
    assert told >= 8 * LONG, "the engines' own sums are of both lanes"


@pytest.mark.full
def test_a_lane_that_dies_takes_nobody_with_it(pair: MeshProcesses) -> None:
    host = pair.nodes["one"]
    before = pair.serving()
    first, second = until_both(host)
    alone = [text(host, number) for number in range(2)]

    for victim in (second, first):
        with both_answering(host) as answers:
            psutil.Process(victim["pid"]).kill()
            assert [each.result() for each in answers] == alone
        healed = until_both(host)
        assert victim["pid"] not in {lane["pid"] for lane in healed}

    assert pair.serving().epoch == before.epoch, "the plan goes on"


@pytest.mark.full
def test_both_lanes_go_on_where_a_worker_dies(pair: MeshProcesses) -> None:
    host = pair.nodes["one"]
    before = pair.serving()
    until_both(host)
    alone = [text(host, number) for number in range(2)]

    with both_answering(host) as answers:
        pair.kill("two")
        assert [each.result() for each in answers] == alone

    assert len(until_both(host)) == 2
    pair.restart("two")
    pair.serving(on=pair.nodes, above=before.epoch)


@pytest.mark.full
def test_lanes_come_and_go_with_the_settings_and_with_the_demand(pair: MeshProcesses) -> None:
    """Last in this file: it leaves the mesh with other settings."""
    host = pair.nodes["one"]
    before = pair.serving()
    until_both(host)
    alone = [text(host, number) for number in range(2)]

    with both_answering(host) as answers:
        lanes_of_mesh(host, "1")
        assert [each.result() for each in answers] == alone, "no answer is cut"
    until(lambda: len(pair.engines("one")) == 1, within_s=HEAL_S, what="one lane is left")

    lanes_of_mesh(host, "auto")
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(text, host, number, 250) for number in range(3)]
        until(lambda: host.status()["plan"]["lanes"] == 2, within_s=HEAL_S, what="a lane for those who wait")
        assert all(each.result() for each in answers)
    assert pair.serving().epoch == before.epoch, "the plan goes on"


def lanes_of_mesh(host: NodeProcess, lanes: str) -> None:
    model = host.status()["model"]["name"]
    ended = mesh_llm("load", model, "--lanes", lanes, "--home", host.home)
    assert ended.status == 0, ended.stderr
