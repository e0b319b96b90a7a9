"""Models that are loaded when somebody asks for them, and go again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, Lab, lab
from tests.support.waiting import until

HEAL_S = 60.0
ROOM = "20MB"
"""For the default model, which needs 12 MB, and one of 5 MB beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemand:
    """An owner, a node that has no file at first, and a lite client."""

    nodes: Lab
    owner: JoiningNode
    node: JoiningNode
    client: JoiningNode
    files: Path

    def load(self, name: str, *options: str, layers: int = 8, seed: int = 0) -> None:
        file = tiny_gguf.write(self.files / f"{name}.gguf", "qwen3", layers=layers, seed=seed)
        loaded = mesh_llm("load", file, "--on-demand", *options, *PLAN, "--home", self.owner.home)
        assert loaded.status == 0, loaded.stderr
        assert f"{name} is at hand" in loaded.stdout
        self.until_state("waiting", name)

    def until_state(self, state: str, name: str) -> None:
        for node in (self.owner, self.node, self.client):

            def is_so(node: JoiningNode = node) -> bool:
                return not node.running or state_of(node, name)[0] == state

            until(is_so, within_s=HEAL_S, what=f"{name} is {state}")


def state_of(node: JoiningNode, name: str) -> tuple[str, str]:
    status = node.status_or_none() or {"models": ()}
    found = [each for each in status["models"] if each["name"] == name]
    return (found[0]["state"], found[0]["reason"]) if found else ("", "")


@contextmanager
def mesh(model: Path, files: Path, *options: str) -> Iterator[OnDemand]:
    with lab(model) as nodes:
        owner = nodes.create("owner", *options)
        node = nodes.join("node", owner, *options, models=nodes.folder / "empty")
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        yield OnDemand(nodes=nodes, owner=owner, node=node, client=client, files=files)


@pytest.fixture(scope="module")
def at_hand(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnDemand]:
    with mesh(model, tmp_path_factory.mktemp("files"), "--max-memory", ROOM) as found:
        found.load("coder", "--idle", "5s")
        yield found


@pytest.fixture(scope="module")
def scribe(at_hand: OnDemand) -> str:
    at_hand.load("scribe", seed=3)
    return "scribe"


def ask(node: JoiningNode, model: str, **more: Any) -> Any:
    return node.ask("/v1/completions", {**TEXT, "model": model, **more})


def text_of(node: JoiningNode, model: str, **more: Any) -> str:
    reply = ask(node, model, **more)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def test_a_request_loads_it_and_it_goes_when_idle(at_hand: OnDemand) -> None:
    assert "at hand" in state_of(at_hand.client, "coder")[1]
    listed = at_hand.client.ask("/v1/models").json()["data"]
    assert [(each["id"], each["status"]["value"]) for each in listed] == [
        ("tiny", "loaded"),
        ("coder", "unloaded"),
    ]
    text = text_of(at_hand.client, "coder")
    assert state_of(at_hand.client, "coder")[0] == "serving"
    assert text_of(at_hand.owner, "coder") == text
    at_hand.until_state("waiting", "coder")
    assert text_of(at_hand.node, "coder") == text


def test_ollamas_stop_lets_it_go(at_hand: OnDemand) -> None:
    at_hand.load("writer", "--idle", "10m", seed=1)
    text_of(at_hand.client, "writer")
    stop = {"model": "writer", "keep_alive": 0, "stream": False}
    assert at_hand.node.ask("/api/generate", stop).status == 403, "it is no owner's node"
    assert at_hand.owner.ask("/api/generate", stop).json()["done_reason"] == "unload"
    at_hand.until_state("waiting", "writer")
    assert mesh_llm("unload", "writer", "--home", at_hand.owner.home).status == 0


def test_models_are_listed_with_what_the_mesh_does_with_them(at_hand: OnDemand) -> None:
    shown = mesh_llm("models", "--home", at_hand.owner.home)
    assert shown.status == 0, shown.stderr
    _, table = shown.stdout.split("in the mesh")
    rows = [line.split() for line in table.splitlines()[1:]]
    assert rows[0] == ["tiny", "(default)", "served", "512", "1"]
    assert rows[1][0] == "coder"
    document = json.loads(mesh_llm("models", "--json", "--home", at_hand.owner.home).stdout)
    assert document["served"][1]["state"] in ("at hand", "served", "loading")
    assert "smollm2" in document["catalog"]


def test_what_cannot_fit_is_refused_with_the_figures(at_hand: OnDemand) -> None:
    at_hand.load("giant", layers=120)
    for node in (at_hand.owner, at_hand.client):
        refused = ask(node, "giant")
        assert refused.status == 503
        assert "need " in refused.json()["error"]["message"]
    assert mesh_llm("unload", "giant", "--home", at_hand.owner.home).status == 0


@pytest.mark.full
def test_clients_that_ask_for_several_models_in_turn_are_all_answered(at_hand: OnDemand) -> None:
    """There is not memory for all three at once."""
    at_hand.load("writer", "--idle", "3s", seed=1)
    at_hand.load("critic", "--idle", "3s", seed=2)
    names = ("coder", "writer", "critic")
    nodes = (at_hand.owner, at_hand.node, at_hand.client)
    with ThreadPoolExecutor(10) as clients:
        asked = [(name, clients.submit(text_of, nodes[i % 3], name)) for i, name in enumerate(names * 4)]
        texts = {name: {each.result() for found, each in asked if found == name} for name in names}
    assert [len(found) for found in texts.values()] == [1, 1, 1]
    assert len(set.union(*texts.values())) == 3
    assert state_of(at_hand.owner, "tiny")[0] == "serving"


@pytest.mark.full
def test_ten_clients_that_ask_for_ten_models_in_turn_are_all_answered(model: Path, tmp_path: Path) -> None:
    """There is memory for two of them at a time, and none that was just loaded goes at once."""
    names = [f"model{number}" for number in range(10)]
    with mesh(model, tmp_path, "--max-memory", ROOM) as found:
        for seed, name in enumerate(names):
            found.load(name, "--idle", "3s", seed=seed)
        nodes = (found.owner, found.node, found.client)

        def in_turn(first: int) -> list[tuple[str, str]]:
            own = (names[first:] + names[:first])[:3]
            return [(name, text_of(nodes[first % 3], name)) for name in own]

        def somebody_waits() -> bool:
            reasons = [each["reason"] for each in found.owner.status()["models"]]
            return any("it waits for the memory of" in reason for reason in reasons)

        with ThreadPoolExecutor(10) as clients:
            asked = [clients.submit(in_turn, number) for number in range(10)]
            until(somebody_waits, within_s=HEAL_S, what="a client is told what its model waits for")
            told = [answer for each in asked for answer in each.result()]
        assert len(told) == 30
        assert len(set(told)) == len({text for _, text in told}) == 10, "each model always says the same"
        assert state_of(found.owner, "tiny")[0] == "serving"


@pytest.mark.full
def test_api_clients_load_and_unload_models_at_an_owners_node(at_hand: OnDemand, scribe: str) -> None:
    loaded = at_hand.owner.ask("/models/load", {"model": scribe})
    assert (loaded.status, loaded.json()) == (200, {"success": True})
    at_hand.until_state("serving", "scribe")
    refused = at_hand.node.ask("/models/unload", {"model": "scribe"})
    assert refused.status == 403
    assert "only owners of the mesh choose its models" in refused.json()["error"]["message"]
    unloaded = at_hand.owner.ask("/models/unload", {"model": "scribe"})
    assert (unloaded.status, unloaded.json()) == (200, {"success": True})
    at_hand.until_state("waiting", "scribe")
    default = at_hand.owner.ask("/models/unload", {"model": "tiny"})
    assert default.status == 400
    assert "tiny is the default model" in default.json()["error"]["message"]
    outside = at_hand.owner.ask("/models/load", {"model": str(at_hand.files / "scribe.gguf")})
    assert outside.status == 400
    # At hand, any node whose user may manage it has it loaded.
    assert at_hand.client.ask("/models/load", {"model": "scribe"}).status == 200
    at_hand.until_state("serving", "scribe")


def test_an_answer_is_finished_while_its_model_is_unloaded(at_hand: OnDemand, scribe: str) -> None:
    question = {**TEXT, "model": scribe, "max_tokens": 300, "stream": True}
    with at_hand.client.stream("/v1/completions", question) as stream:
        chunks = stream.data()
        next(chunks)
        assert at_hand.owner.ask("/models/unload", {"model": "scribe"}).status == 200
        # Whoever asks for it now has it loaded again.
        text = text_of(at_hand.owner, "scribe")
        *_, last = chunks
    assert last == "[DONE]"
    assert text_of(at_hand.client, "scribe") == text


@pytest.mark.full
def test_a_file_that_has_vanished_everywhere(at_hand: OnDemand) -> None:
    at_hand.load("ghost", seed=4)
    until(lambda: (at_hand.nodes.folder / "empty" / "ghost.gguf").exists(), within_s=HEAL_S, what="fetched")
    for file in (at_hand.files / "ghost.gguf", at_hand.nodes.folder / "empty" / "ghost.gguf"):
        file.unlink()
    failed = ask(at_hand.client, "ghost")
    assert failed.status == 503
    assert text_of(at_hand.client, "coder")


def test_two_owners_who_load_models_at_once_both_have_them(at_hand: OnDemand) -> None:
    at_hand.owner.control("/api/promote", {"name": "node"})

    def owns() -> bool:
        members = (at_hand.node.status_or_none() or {"mesh": {"nodes": ()}})["mesh"]["nodes"]
        return [each["owner"] for each in members].count(True) == 2

    until(owns, within_s=HEAL_S, what="there are two owners")
    names = ("left", "right")
    files = [
        tiny_gguf.write(at_hand.files / f"{name}.gguf", "qwen3", seed=8 + i) for i, name in enumerate(names)
    ]
    with ThreadPoolExecutor(2) as owners:
        asked = [
            owners.submit(node.control, "/api/load-model", {"name": str(file), "on_demand": True})
            for node, file in zip((at_hand.owner, at_hand.node), files, strict=True)
        ]
        assert [each.result()["downloading"] for each in asked] == [False, False]
    for name in names:
        at_hand.until_state("waiting", name)


@pytest.mark.full
def test_a_node_that_dies_while_the_model_is_loaded(at_hand: OnDemand) -> None:
    """The last one: it takes a node away."""
    text = text_of(at_hand.client, "coder")
    status = at_hand.client.status()
    host = next(each["host"] for each in status["models"] if each["name"] == "coder")
    nodes = {node.status()["node"]["id"]: node for node in (at_hand.owner, at_hand.node)}
    at_hand.until_state("waiting", "coder")
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(text_of, at_hand.client, "coder")
        until(lambda: state_of(nodes[host], "coder")[0] == "loading", within_s=HEAL_S, what="it loads")
        nodes[host].signal(signal.SIGKILL)
        assert asked.result() == text
