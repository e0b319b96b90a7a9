"""Which of several models has memory, where they do not all fit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, lab
from tests.support.waiting import until

HEAL_S = 60.0
ROOM = "20MB"
"""For the default model, which needs 12 MB, or for the other one."""
ROOMS = {"one": "15.8MB", "two": "12.5MB"}
"""The default one needs 12.3 MB, the other one 15.6, and more where it is split over what that leaves."""


def load(owner: JoiningNode, file: Path | str, *options: str) -> None:
    loaded = mesh_llm("load", file, *options, "--home", owner.home)
    assert loaded.status == 0, loaded.stderr


def state_of(node: JoiningNode, name: str) -> str:
    status = node.status_or_none() or {"models": ()}
    return next((str(each["state"]) for each in status["models"] if each["name"] == name), "")


def ask(node: JoiningNode, model: str) -> Any:
    return node.ask("/v1/completions", {**TEXT, "model": model})


def until_told(nodes: Iterable[JoiningNode], model: str, why: str) -> None:
    """Clients of all of them hear why it is not served."""

    def agree() -> bool:
        replies = [ask(node, model) for node in nodes]
        return all((reply.status, reply.json()["error"]["message"]) == (503, why) for reply in replies)

    until(agree, within_s=HEAL_S, what=why)


def text_of(node: JoiningNode, model: str) -> str:
    reply = ask(node, model)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def until_states(*nodes: JoiningNode, **states: str) -> None:
    def agree() -> bool:
        return all(state_of(node, name) == state for node in nodes for name, state in states.items())

    until(agree, within_s=HEAL_S, what=f"the models are {states}")


def test_a_higher_priority_takes_the_memory_of_a_lower_one_and_gives_it_back(
    model: Path, tmp_path: Path
) -> None:
    """The default model is no exception."""
    file = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=40)
    with lab(model) as nodes:
        owner = nodes.create("owner", "--max-memory", ROOM)
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        both = (owner, client)
        engine = owner.status()["engine"]["pid"]

        planned = mesh_llm("plan", "--model", file, *PLAN, "--home", owner.home)
        assert "planned beside tiny, which holds 12 MB; without it, this model would fit" in planned.stdout
        planned = mesh_llm("plan", "--model", file, *PLAN, "--priority", "1", "--home", owner.home)
        assert re.search(r"tiny goes to make room for it; \d+ MB to read again when it", planned.stdout)
        load(owner, file, *PLAN)
        until_states(*both, tiny="serving", coder="waiting")
        until_told(
            both,
            "coder",
            "need 16 MB for the model, have 8 MB on 1 node; it would fit without tiny, 8 MB to read then",
        )
        # Equals: whoever has the memory keeps it, and another priority restarts nothing.
        load(owner, "coder", "--priority", "-1")
        load(owner, "tiny", "--priority", "2")
        load(owner, "coder", "--priority", "1")
        until_states(*both, tiny="serving", coder="waiting")
        assert owner.status()["engine"]["pid"] == engine

        load(owner, "coder", "--priority", "5")
        until_states(*both, tiny="waiting", coder="serving")
        until_told(
            both,
            "tiny",
            "need 12 MB for the model, have 4 MB on 1 node; it would fit without coder, 6 MB to read then",
        )
        assert {each["name"]: each["priority"] for each in client.status()["models"]} == {
            "tiny": 2,
            "coder": 5,
        }
        text = text_of(client, "coder")
        assert text

        load(owner, "tiny", "--priority", "9")
        until_states(*both, tiny="serving", coder="waiting")
        assert mesh_llm("unload", "coder", "--home", owner.home).status == 0
        assert text_of(client, "tiny")


def test_a_higher_priority_whose_file_is_broken_gives_the_memory_back(model: Path, tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=40)
    with lab(model) as nodes:
        owner = nodes.create("owner", "--max-memory", ROOM)
        load(owner, file, *PLAN)
        until_states(owner, tiny="serving", coder="waiting")
        # As a failing disk does it: to whoever looks, nothing has been written.
        about = file.stat()
        with file.open("r+b") as opened:
            opened.write(bytes(4096))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))

        load(owner, "coder", "--priority", "5")
        owner.until(lambda: "failed with it again and again" in owner.stdout, what="it gives up for now")
        until_states(owner, tiny="serving", coder="waiting")
        assert text_of(owner, "tiny")


def test_what_moves_is_told_with_the_reason_and_the_price(model: Path, tmp_path: Path) -> None:
    """By the plan before, by `status` afterwards, and by every node."""
    file = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=40)
    with lab(model) as nodes:
        owner = nodes.create("one", "--max-memory", ROOMS["one"])
        other = nodes.join("two", owner, "--max-memory", ROOMS["two"], models=nodes.folder / "empty")
        load(owner, file, *PLAN, "--priority", "-1")
        until_states(owner, other, tiny="serving", coder="waiting")
        planned = mesh_llm("plan", "--model", "coder", "--priority", "5", "--home", owner.home)
        assert "tiny moves to two to make room for it; 6 MB to read there" in planned.stdout
        load(owner, "coder", "--priority", "5")
        until_states(owner, other, tiny="serving", coder="serving")
        told = "moved from one to make room for coder, at the price of reading 6 MB"
        for node in (owner, other):
            shown = mesh_llm("status", "--home", node.home).stdout
            assert re.search(rf"why +fits on two alone; {told}", shown), shown
            assert re.search(rf"tiny \(default\) .*serving: fits on two alone; {told}", shown), shown
            reasons = {each["name"]: each["reason"] for each in node.status()["models"]}
            assert reasons == {"tiny": f"fits on two alone; {told}", "coder": ""}


@pytest.mark.full
@pytest.mark.parametrize("victim", ["one", "two"])
def test_a_node_dies_while_a_model_moves_to_another_one(model: Path, tmp_path: Path, victim: str) -> None:
    """The default model leaves the only node that holds the other one, which is loaded there then."""
    file = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=40)
    with lab(model) as nodes:
        owner = nodes.create("one", "--max-memory", ROOMS["one"])
        other = nodes.join("two", owner, "--max-memory", ROOMS["two"], models=nodes.folder / "empty")
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        names = {node.status()["node"]["id"]: node.name for node in (owner, other)}
        load(owner, file, *PLAN, "--priority", "-1")
        until_states(owner, other, client, tiny="serving", coder="waiting")
        text = text_of(client, "tiny")

        dies = {node.name: node for node in (owner, other)}[victim]
        question = {**TEXT, "model": "tiny", "max_tokens": 400, "stream": True}
        question["stream_options"] = {"include_usage": True}
        with client.stream("/v1/completions", question) as stream:
            chunks = stream.data()
            next(chunks)
            owner.control("/api/load-model", {"name": "coder", "options": {"priority": 5}})
            until(lambda: has_engine(other), within_s=HEAL_S, what="the default model moves")
            dies.signal(signal.SIGKILL)
            *_, usage, last = chunks
        assert last == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 400
        dies.process.wait(30)
        if victim == "one":
            until_states(other, client, tiny="serving", coder="waiting")
            assert text_of(client, "tiny") == text
            nodes.start("one", "--max-memory", ROOMS["one"], models=tmp_path).until_ready()
        else:
            until_states(owner, client, tiny="waiting", coder="serving")
            assert ask(client, "tiny").status == 503
            nodes.start("two", "--max-memory", ROOMS["two"], models=nodes.folder / "empty").until_ready()
        until_states(client, tiny="serving", coder="serving")
        hosts = {each["name"]: names[each["host"]] for each in client.status()["models"]}
        assert hosts == {"tiny": "two", "coder": "one"}
        assert text_of(client, "tiny") == text


def has_engine(node: JoiningNode) -> bool:
    """One that starts, or serves."""
    return any("mesh_llm.engine.children.serve" in line for line in node.command_lines().values())


@pytest.mark.full
def test_the_highest_priority_has_the_memory_after_a_start(model: Path, tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=40)
    with lab(model) as nodes:
        owner = nodes.create("owner", "--max-memory", ROOM, models=tmp_path)
        load(owner, file, *PLAN, "--priority", "3")
        until_states(owner, tiny="waiting", coder="serving")
        owner.stop()

        again = nodes.start("owner", "--model", model, *PLAN, "--max-memory", ROOM, models=tmp_path)
        until_states(again, tiny="waiting", coder="serving")
        assert text_of(again, "coder")
