"""A model that runs more than once: who hosts it, how it grows, and what the loss of a host costs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.joining import JoiningNode, lab

HEAL_S = 60.0
QUESTION = {
    "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "temperature": 0,
    "max_tokens": 48,
}


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


def words(node: JoiningNode) -> str:
    reply = node.ask("/v1/chat/completions", QUESTION)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["message"]["content"])


def test_one_more_comes_while_requests_wait(replicated: Replicated) -> None:
    (first,) = replicated.until_replicas(1)
    enough = Event()

    def ask_again_and_again() -> set[int]:
        seen = set()
        while not enough.is_set():
            seen.add(replicated.client.ask("/v1/chat/completions", {**QUESTION, "max_tokens": 16}).status)
        return seen

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask_again_and_again) for _ in range(3)]
        try:
            assert first in replicated.until_replicas(2)
        finally:
            enough.set()
        assert [answer.result() for answer in answers] == [{200}] * 3
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
    text = "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in told[:-1])
    assert (told[-1], {text}) == ("[DONE]", expected)
    print(f"the answer paused for {paused_s:.2f} s")
    assert paused_s < HEAL_S / 2
    victim.process.wait(30)
    # Nobody else may host: the one that is left goes on, with the engine that it has.
    assert replicated.until_replicas(1) == [host for host in before if replicated.nodes[host].running]
