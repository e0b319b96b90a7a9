"""Machines that are lent for a while only: `mesh-llm pause` and `resume`, and --lend."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.command import Ended, mesh_llm
from tests.support.mesh import HEAL_S, MeshProcesses
from tests.support.waiting import until

LONG: dict[str, Any] = {
    "prompt": "1 2 3 4 5 6 7",
    "temperature": 0,
    "ignore_eos": True,
    "cache_prompt": False,
    "max_tokens": 200,
}
PAUSED = "Paused: this node lends nothing; mesh-llm resume lends again\n"


def told(mesh: MeshProcesses, name: str, verb: str, *options: str) -> Ended:
    ended = mesh_llm(verb, "--home", mesh.nodes[name].home, *options, within_s=2 * HEAL_S)
    assert ended.status == 0, ended.stderr
    return ended


def left_out(mesh: MeshProcesses, name: str) -> dict[str, str]:
    """Who has no part in the plan, and why, as this node tells."""
    document = mesh.nodes[name].status()
    names = {member["id"]: member["name"] for member in document["mesh"]["nodes"]}
    return {names[entry["node"]]: entry["reason"] for entry in document["plan"]["excluded"]}


def text_of(chunks: list[str]) -> str:
    assert chunks[-1] == "[DONE]", chunks[-1]
    choices = (choice for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"])
    return "".join(choice["text"] for choice in choices)


@pytest.mark.full
def test_answers_go_on_while_a_worker_pauses_and_lends_again(mesh: MeshProcesses) -> None:
    mesh.create("one", "--split")
    mesh.join("two")
    before = mesh.serving()
    host, worker = before.host, before.workers[0]
    whole = mesh.nodes[host].ask("/v1/completions", LONG).json()["choices"][0]["text"]

    with mesh.nodes[worker].stream("/v1/completions", {**LONG, "stream": True}) as stream:
        chunks = [stream.next()]
        said = told(mesh, worker, "pause")
        chunks += stream.data()

    assert said.stdout == PAUSED
    assert text_of(chunks) == whole
    alone = mesh.serving(on=[host], above=before.epoch)
    assert alone.host == host
    # Both know why, and its own API goes on with what the other computes.
    until(
        lambda: left_out(mesh, host) == {worker: "is paused: its user paused it"},
        within_s=HEAL_S,
        what="the plan says why",
    )
    assert "lends        nothing: its user paused it\n" in told(mesh, worker, "status").stdout
    assert mesh.nodes[worker].ask("/v1/completions", LONG).json()["choices"][0]["text"] == whole
    mesh.nodes[worker].until_no_descendants(within_s=HEAL_S)

    told(mesh, worker, "resume")
    mesh.serving(above=alone.epoch)
    assert "lends " in told(mesh, worker, "status").stdout
    assert mesh.nodes[worker].status()["node"]["paused"] == ""
    lines = mesh.nodes[worker].stdout.splitlines()
    assert "Paused: its user paused it. Others take over what they can" in lines
    assert "Lending again" in lines


@pytest.mark.full
def test_another_host_takes_over_before_the_host_pauses(mesh: MeshProcesses) -> None:
    mesh.create("one")
    mesh.join("two")
    before = mesh.serving(on=["one"])
    whole = mesh.nodes["one"].ask("/v1/completions", LONG).json()["choices"][0]["text"]

    with mesh.nodes["one"].stream("/v1/completions", {**LONG, "stream": True}) as stream:
        chunks = [stream.next()]
        answer = json.loads(told(mesh, "one", "pause", "--json").stdout)
        chunks += stream.data()

    assert answer == {"paused": "its user paused it", "lent_bytes": 0, "serving": True}
    assert text_of(chunks) == whole
    mesh.serving(on=["two"], above=before.epoch)
    mesh.nodes["one"].until_no_descendants(within_s=HEAL_S)


@pytest.mark.full
def test_where_nobody_can_take_over_it_says_so_and_lets_go(mesh: MeshProcesses) -> None:
    mesh.create("one", "--max-memory", "0.12GB")
    mesh.join("two", "--max-memory", "0.12GB")
    mesh.serving()

    ended = told(mesh, "two", "pause")

    assert ended.stdout == PAUSED
    assert ended.stderr.startswith("Nothing answers at present: ")
    mesh.nodes["two"].until_no_descendants(within_s=HEAL_S)
    resumed = told(mesh, "two", "resume")
    assert resumed.stderr in ("", "Nothing answers at present: the next plan is being made\n")
    mesh.serving()


@pytest.mark.full
def test_outside_of_its_hours_a_node_lends_nothing(mesh: MeshProcesses) -> None:
    later = time.localtime(time.time() + 6 * 3600)
    hours = f"{later.tm_hour:02}:00-{(later.tm_hour + 1) % 24:02}:00"
    mesh.create("one", "--split")
    mesh.join("two", "--lend", hours)

    mesh.serving(on=["one"])
    reason = f"it lends at {hours} only"
    until(
        lambda: left_out(mesh, "one") == {"two": f"is paused: {reason}"},
        within_s=HEAL_S,
        what="the plan says why",
    )
    status = mesh.nodes["two"].status()["node"]
    assert (status["resting"], status["paused"], status["lend"]) == (True, reason, hours)
    # Its user's word counts more.
    told(mesh, "two", "resume")
    mesh.serving()
