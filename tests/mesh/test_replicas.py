"""A model that runs more than once: who hosts it, how it grows, and what the loss of a host costs."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.joining import JoiningNode, lab
from tests.support.node import Stream
from tests.support.waiting import until

HEAL_S = 60.0
QUESTION = {
    "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "temperature": 0,
    "max_tokens": 48,
}
LONG = 400
"""Tokens: some ten seconds."""
SHORT_IDLE = """
import sys
from mesh_llm.planning import replicas
replicas.CROWDED_UNTIL_S = 3.0
from mesh_llm.cli.entry import main
sys.exit(main())
"""
"""A node that takes an engine for idle after seconds, where others take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Two nodes with the model's file, one that may not host, and a lite client."""

    nodes: dict[str, JoiningNode]
    """All three, by id."""
    client: JoiningNode

    def model(self, through: JoiningNode | None = None) -> dict[str, Any]:
        status = (through or self.client).status_or_none()
        return status["models"][0] if status is not None else {"replicas": []}

    def hosts(self, through: JoiningNode | None = None) -> list[str]:
        return [str(each["host"]) for each in self.model(through)["replicas"]]

    def until_replicas(self, count: int) -> list[str]:
        """Every node tells of so many, and of the same."""

        def agree(_: object) -> bool:
            running = [node for node in (*self.nodes.values(), self.client) if node.running]
            seen = [self.hosts(node) for node in running]
            return all(hosts == seen[0] and len(hosts) == count for hosts in seen)

        self.client.until_status(agree, what=f"the model runs {count} times", within_s=HEAL_S)
        return self.hosts()


@pytest.fixture(scope="module")
def replicated(smollm2: Path) -> Iterator[Replicated]:
    with lab(smollm2) as nodes:
        owner = nodes.create("owner", "--replicas", "1-2")
        two = nodes.join("two", owner)
        third = nodes.join("third", owner, "--hosting", "never")
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        members = {node.status()["node"]["id"]: node for node in (owner, two, third)}
        yield Replicated(nodes=members, client=client)


def words(node: JoiningNode, **more: Any) -> str:
    reply = node.ask("/v1/chat/completions", {**QUESTION, **more})
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["message"]["content"])


def text_in(chunks: Iterable[str]) -> str:
    return "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in chunks)


@contextmanager
def crowd(replicated: Replicated, clients: int) -> Iterator[None]:
    """So many ask again and again, and all are answered."""
    enough = Event()

    def ask_again_and_again() -> set[int]:
        seen = set()
        while not enough.is_set():
            seen.add(replicated.client.ask("/v1/chat/completions", {**QUESTION, "max_tokens": 16}).status)
        return seen

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask_again_and_again) for _ in range(clients)]
        try:
            yield
        finally:
            enough.set()
        assert [answer.result() for answer in answers] == [{200}] * clients


def test_one_more_comes_while_requests_wait(replicated: Replicated) -> None:
    (first,) = replicated.until_replicas(1)
    with crowd(replicated, clients=3):
        assert first in replicated.until_replicas(2)
    model = replicated.model()
    assert (model["replicas_wanted"], model["replicas_least"], model["replicas_most"]) == (2, 1, 2)
    assert [each["crowded"] for each in model["replicas"] if each["host"] == first] == [True]


def test_a_conversation_stays_with_its_engine(replicated: Replicated) -> None:
    """Whichever node it comes through: half of them have not seen its beginning."""
    question = {"role": "user", "content": "What is a lighthouse good for? " * 8}
    answer = {"role": "assistant", "content": "For ships."}
    first, second = (
        {**QUESTION, "max_tokens": 1, "messages": each} for each in ([question], [question, answer, question])
    )
    reply = replicated.client.ask("/v1/chat/completions", first)
    for node in replicated.nodes.values():
        again = node.ask("/v1/chat/completions", second)
        assert again.headers["x-mesh-llm-served-by"] == reply.headers["x-mesh-llm-served-by"]


def test_the_same_words_go_on_at_once_when_a_host_is_killed(replicated: Replicated) -> None:
    expected = {words(replicated.nodes[host]) for host in replicated.hosts()}
    assert len(expected) == 1
    before = replicated.hosts()
    with replicated.client.stream("/v1/chat/completions", {**QUESTION, "stream": True}) as stream:
        host = stream.response.headers["x-mesh-llm-served-by"]
        (victim,) = (node for node in replicated.nodes.values() if node.name == host)
        chunks = stream.data()
        told = [next(chunks) for _ in range(12)]
        victim.signal(signal.SIGKILL)
        began_s = time.monotonic()
        told.append(next(chunks))
        paused_s = time.monotonic() - began_s
        told += chunks
    assert (told[-1], {text_in(told[:-1])}) == ("[DONE]", expected)
    print(f"the answer paused for {paused_s:.2f} s")
    assert paused_s < HEAL_S / 2
    victim.process.wait(30)
    # Nobody else may host: the one that is left goes on, with the engine that it has.
    assert replicated.until_replicas(1) == [host for host in before if replicated.nodes[host].running]


def stream_from(host: str, client: JoiningNode, stack: ExitStack, **more: Any) -> Stream:
    """An answer that comes from there; others are left."""
    while True:
        with ExitStack() as other:
            question = {**QUESTION, **more, "stream": True}
            stream = other.enter_context(client.stream("/v1/chat/completions", question))
            if stream.response.headers["x-mesh-llm-served-by"] == host:
                stack.push(other.pop_all())
                return stream


@pytest.mark.full
def test_one_goes_again_when_nobody_waits_and_cuts_no_answer(smollm2: Path) -> None:
    program = (sys.executable, "-c", SHORT_IDLE)
    with lab(smollm2) as nodes, ExitStack() as stack:
        # While one of two turns is taken, an engine counts as idle.
        owner = nodes.create("owner", "--replicas", "1-2", "--parallel", "2", program=program)
        two = nodes.join("two", owner, program=program)
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        members = {node.status()["node"]["id"]: node for node in (owner, two)}
        mesh = Replicated(nodes=members, client=client)
        (first,) = mesh.until_replicas(1)
        with crowd(mesh, clients=5):
            (second,) = set(mesh.until_replicas(2)) - {first}
            chunks = stream_from(members[second].name, client, stack, max_tokens=LONG).data()
        told = [next(chunks)]
        assert mesh.until_replicas(1) == [first]
        told += chunks
        assert (told[-1], text_in(told[:-1])) == ("[DONE]", words(members[first], max_tokens=LONG))
        assert "request resumed elsewhere" not in client.logs()
        until(lambda: not serves(members[second]), within_s=HEAL_S, what="its engine has ended")


def serves(node: JoiningNode) -> bool:
    return any("mesh_llm.engine.children.serve" in line for line in node.command_lines().values())
