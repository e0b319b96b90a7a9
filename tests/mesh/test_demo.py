"""`mesh-llm demo`: a mesh of real nodes on this machine, as somebody sees it who has just come."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Running, marked, mesh_llm, start
from tests.support.questions import ABOUT_SKY
from tests.support.waiting import until

WAIT_S = 90.0
"""A demo on a busy machine; a quiet one needs some five seconds."""


def environment(home: Path) -> dict[str, str]:
    return {"MESH_LLM_HOME": str(home)}


def demo(home: Path, *options: str) -> dict[str, Any]:
    ended = mesh_llm(
        "demo", "--once", "--json", "--port", "0", *options, env=environment(home), within_s=WAIT_S
    )
    assert ended.status == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


@pytest.mark.full
def test_it_answers_from_three_nodes_and_ends(smollm2: Path, home: Path) -> None:
    figures = demo(home)

    assert figures["model"] == "SmolLM2-135M-Instruct.Q4_1"
    assert re.match(ABOUT_SKY, figures["answer"])
    assert sorted(node["name"] for node in figures["nodes"]) == ["one", "three", "two"]
    assert figures["nodes"][0]["name"] == "one"
    assert [(node["first"], node["last"]) for node in figures["nodes"]] == [(0, 10), (10, 20), (20, 30)]
    assert [node["link"]["kind"] for node in figures["nodes"]] == ["self", "local", "local"]
    assert figures["weights_sent_bytes"] == 0
    assert figures["decode_tok_s"] > 0
    assert figures["predicted_tok_s"] > 0
    assert figures["first_token_s"] > 0


@pytest.mark.full
def test_what_people_see_of_it(smollm2: Path, home: Path) -> None:
    ended = mesh_llm("demo", "--nodes", "2", "--port", "0", env=environment(home), within_s=WAIT_S)

    assert ended.status == 0, ended.stderr
    assert re.search(rf"\nQuestion: Why is the sky blue\?\nAnswer:   {ABOUT_SKY}", ended.stdout)
    assert "Invite token" not in ended.stdout
    assert "\n  mesh-llm run smollm2 " in ended.stderr
    *_, stages, figures = ended.stdout.split("\n\n")
    assert stages.splitlines()[0].split() == ["node", "layers", "share", "link", "rtt", "memory"]
    assert [line.split()[:2] for line in stages.splitlines()[1:]] == [["one", "0-14"], ["two", "15-29"]]
    assert "\nweights      0 bytes sent, 66 MB in memory\n" in figures
    assert re.search(r"\nstart +[\d.]+ s until the first token\n", figures)
    first = r"\nfirst token  [\d.]+ s for a prompt of \d+ tokens, predicted [\d.]+ s \([\d.]+-[\d.]+\)\n"
    assert re.search(first, figures)
    assert re.search(r"\npredicted +[\d.]+ tok/s \([\d.]+-[\d.]+\)\ndecode +[\d.]+ tok/s\n", figures)


@pytest.mark.long
def test_latency_is_on_every_link(smollm2: Path, home: Path) -> None:
    figures = demo(home, "--latency", "40")

    # Three links of 40 ms, one after the other, for each step: 8.3 of them a second; guesses add tokens.
    assert 0 < figures["decode_tok_s"] < 2 / 0.120
    assert 0 < figures["predicted_tok_s"] < 1 / 0.120
    assert all(node["link"]["rtt_ms"] >= 80 for node in figures["nodes"][1:])
    assert re.match(ABOUT_SKY, figures["answer"])


@pytest.mark.long
def test_a_latency_for_each_node(smollm2: Path, home: Path) -> None:
    figures = demo(home, "--latency", "10,50")

    rtt_ms = {node["name"]: node["link"]["rtt_ms"] for node in figures["nodes"]}
    assert rtt_ms["two"] >= 20
    assert rtt_ms["three"] >= 100
    # To the near one, on to the far one, and back from there, in either order.
    assert figures["decode_tok_s"] < 1 / 0.110


@pytest.mark.long
def test_more_nodes_than_layers(home: Path, libraries: dict[str, Path], tmp_path: Path) -> None:
    figures = demo(home, "--nodes", "5", str(tiny_gguf.write(tmp_path / "tiny.gguf", "llama")))

    assert [node["last"] - node["first"] for node in figures["nodes"]] == [1, 1, 1, 1]


@pytest.mark.full
def test_a_model_that_does_not_fit(home: Path, libraries: dict[str, Path], tmp_path: Path) -> None:
    # Sparse: a terabyte that takes no room on the disk.
    large = tiny_gguf.write_sparse(tmp_path / "large.gguf", layers=40, hidden=16384, feed_forward=131072)
    ended = mesh_llm("demo", "--nodes", "2", str(large), env=environment(home), within_s=WAIT_S)

    assert ended.status == 1
    assert "Error: this machine cannot serve it: need " in ended.stderr


class Terminal(Running):
    """`mesh-llm demo` in a terminal of its own."""

    def __init__(self, home: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.screen = ""
        name = os.ttyname(theirs)
        shell = f'exec "$@" <{name} >{name} 2>&1'
        super().__init__(["sh", "-c", shell, "sh", *MESH_LLM, "demo", "--port", "0"], env=environment(home))
        self._watcher = threading.Thread(target=self._watch, name="screen")
        self._watcher.start()
        self._theirs = theirs

    def _watch(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 4096)
            except OSError:
                return
            if not data:
                return
            self.screen += data.decode(errors="replace")

    def until_serving(self) -> None:
        self.until(
            lambda: "Still serving; Ctrl-C ends it" in self.screen,
            what="it serves on",
            within_s=WAIT_S,
        )

    def close(self) -> None:
        os.close(self._theirs)
        self._watcher.join(5)
        os.close(self._ours)

    def members(self) -> list[psutil.Process]:
        """The processes of its nodes; children of these come and go."""
        found = []
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                if "mesh_llm.lab.member" in process.cmdline():
                    found.append(process)
        return found


@contextmanager
def in_a_terminal(home: Path) -> Iterator[Terminal]:
    running = Terminal(home)
    try:
        with running:
            running.until_serving()
            yield running
    finally:
        running.close()


@pytest.mark.full
def test_ctrl_c_ends_all_of_it(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home) as running:
        assert len(running.members()) == 3
        running.signal(signal.SIGINT)
        assert running.wait(within_s=WAIT_S).status == 0
    assert not list(home.rglob("control.sock"))


def ask_for_a_long_answer(home: Path) -> threading.Thread:
    """Under way when this returns."""
    status = json.loads(mesh_llm("status", "--json", "--home", home / "demo").stdout)
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{status['api']['url']}/v1/chat/completions",
        data=json.dumps({**body, "max_tokens": 4000}).encode(),
        headers={"Content-Type": "application/json"},
    )
    begun = threading.Event()

    def read() -> None:
        with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    begun.set()

    thread = threading.Thread(target=read, name="long answer")
    thread.start()
    assert begun.wait(WAIT_S)
    return thread


def test_a_second_ctrl_c_ends_it_at_once(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home) as running:
        asking = ask_for_a_long_answer(home)
        running.signal(signal.SIGINT)
        running.until(lambda: "press Ctrl-C again" in running.screen, what="it is ending")
        began = time.monotonic()
        running.signal(signal.SIGINT)
        assert running.wait(within_s=WAIT_S).status == 130
        # Of fifteen that an answer is given to end.
        assert time.monotonic() - began < 10
        assert "Traceback" not in running.screen
        asking.join()
    assert not list(home.rglob("control.sock"))


@pytest.mark.full
def test_stop_ends_it_from_elsewhere(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home) as running:
        status = mesh_llm("status", "--json", "--home", home / "demo")
        assert len(json.loads(status.stdout)["plan"]["stages"]) == 3
        found = mesh_llm("status", env=environment(home))
        assert found.stdout.startswith("node         one (host)\n"), found.stderr
        assert found.stderr == f"No node is running on {home}; this is the demo, on {home / 'demo'}\n"
        stopped = mesh_llm("demo", "stop", env=environment(home), within_s=WAIT_S)
        assert stopped.status == 0, stopped.stderr
        assert stopped.stdout == f"Stopped the demo with pid {running.pid}\n"
        assert running.family() == []
        assert running.wait(within_s=WAIT_S).status == 0


@pytest.mark.full
def test_a_killed_demo_leaves_no_nodes_behind(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home) as running:
        assert len(running.members()) == 3
        running.signal(signal.SIGKILL)
        running.until_no_descendants(within_s=30)


@pytest.mark.long
def test_a_lost_node_does_not_end_it(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home) as running:
        members = running.members()
        first = json.loads(mesh_llm("status", "--json", "--home", home / "demo").stdout)["node"]["id"]
        max(members, key=lambda process: process.create_time()).kill()

        def healed() -> bool:
            document = json.loads(mesh_llm("status", "--json", "--home", home / "demo").stdout)
            stages = document["plan"]["stages"]
            return document["node"]["state"] == "serving" and len(stages) == 2 and stages[0]["node"] == first

        running.until(healed, what="two nodes serve", within_s=WAIT_S)
        running.signal(signal.SIGTERM)
        assert running.wait(within_s=WAIT_S).status == 0


def test_ctrl_c_before_the_answer(smollm2: Path, home: Path) -> None:
    # Over links as slow as these an answer takes a minute.
    with start("demo", "--port", "0", "--latency", "100", env=environment(home)) as running:
        until(lambda: len(marked(running.marker)) > 1, within_s=WAIT_S, what="its nodes are started")
        running.signal(signal.SIGINT)
        assert running.wait(within_s=WAIT_S).status == 130


@pytest.mark.long
def test_a_second_demo_says_that_there_is_one(smollm2: Path, home: Path) -> None:
    with in_a_terminal(home):
        second = mesh_llm("demo", "--once", "--port", "0", env=environment(home), within_s=WAIT_S)

    assert second.status == 1
    assert second.stderr.startswith(f"Error: {home / 'demo'} is in use by the node with pid ")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["no-such-model"], 1, "no-such-model is neither a file nor a model that mesh-llm knows by name"),
        (["--nodes", "0"], 2, "Invalid value for '--nodes'"),
        (["--latency", "slow"], 2, "--latency slow is not a delay: give milliseconds between 0 and 10,000"),
        (["--latency", "1,2,3"], 2, "--latency has 3 values for 2 nodes after the first"),
    ],
)
def test_what_it_refuses(home: Path, options: list[str], status: int, message: str) -> None:
    ended = mesh_llm("demo", "--once", *options, env=environment(home), within_s=WAIT_S)

    assert ended.status == status
    assert ended.stderr.startswith(f"Error: {message}")
    assert ended.stdout == ""
