"""SmolLM2, a model of another family and one that makes embeddings, on three nodes of which some die."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.support import tiny_gguf
from tests.support.joining import PLAN, JoiningNode, Lab, lab
from tests.support.sampling import sampled
from tests.support.waiting import until

HEAL_S = 60.0
NAMES = ("story", "coder", "embedder")
HIDDEN = 256
OPTIONS = (*PLAN, "--no-draft")
"""Of the mesh; its creator sets them anew whenever it starts."""
MOST = ("--max-memory", "145MB")
"""Of a node: for the story's 130 MB and the coder's 5, or for the embedder's 27 and the coder's."""
STORY: dict[str, Any] = {
    "model": "story",
    "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "temperature": 0,
    "max_tokens": 48,
}
EMBEDDINGS = {"model": "embedder", "input": ["a short text", "another one, which is longer"]}
PAUSE_S = 0.2
"""Between two requests of a client: the machine has other things to do, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Three nodes with the files of all models, and a lite client."""

    lab: Lab
    nodes: dict[str, JoiningNode]
    """By id."""
    client: JoiningNode

    @property
    def running(self) -> list[JoiningNode]:
        return [node for node in (*self.nodes.values(), self.client) if node.running]

    def host(self, name: str) -> JoiningNode:
        return self.nodes[hosts(self.client)[name]]

    def until_whole(self) -> None:
        """Whoever was killed is back."""
        for id, node in self.nodes.items():
            if not node.running:
                options = OPTIONS if node.name == "owner" else ()
                self.nodes[id] = self.lab.start(node.name, *MOST, *options).until_ready()
        self.until_serving()

    def until_serving(self) -> None:
        """All that are left agree on who hosts the three, and those run."""

        def agree() -> bool:
            seen = [hosts(node) for node in self.running]
            runs = [self.nodes[id].running for id in seen[0].values()]
            return all(found == seen[0] for found in seen) and len(runs) == len(NAMES) and all(runs)

        until(agree, within_s=HEAL_S, what="the three models are served")


def hosts(node: JoiningNode) -> dict[str, str]:
    models = (node.status_or_none() or {"models": ()})["models"]
    return {each["name"]: each["host"] for each in models if each["state"] == "serving" and each["host"]}


@pytest.fixture(scope="module")
def mesh(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "story.gguf").symlink_to(smollm2)
    coder = tiny_gguf.write(folder / "coder.gguf", "qwen3", layers=8)
    embedder = tiny_gguf.write(
        folder / "embedder.gguf", "bert", layers=8, hidden=HIDDEN, feed_forward=4 * HIDDEN, context=512
    )
    with lab(folder / "story.gguf") as nodes:
        owner = nodes.create("owner", *MOST, *OPTIONS)
        for model in (coder, embedder):
            owner.control("/api/load-model", {"name": str(model), "options": {"context": 512, "slots": 1}})
        members = (owner, *(nodes.join(name, owner, *MOST) for name in ("two", "three")))
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        yield Mesh(lab=nodes, nodes={node.status()["node"]["id"]: node for node in members}, client=client)


def said(node: JoiningNode) -> str:
    reply = node.ask("/v1/chat/completions", STORY)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["message"]["content"])


def code(node: JoiningNode) -> str:
    question = {"model": "coder", "prompt": "one two three", "temperature": 0, "max_tokens": 8}
    reply = node.ask("/v1/completions", question)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def vectors(node: JoiningNode) -> Any:
    reply = node.ask("/v1/embeddings", EMBEDDINGS)
    assert reply.status == 200, reply.body
    return np.array([entry["embedding"] for entry in reply.json()["data"]])


def are_equal(one: Any, other: Any) -> bool:
    """But for the order of additions, which differs with the company of a step."""
    return bool(np.allclose(one, other, atol=1e-4))


@contextmanager
def asking_for_embeddings(nodes: Iterable[JoiningNode], seen: list[Any], killed: Event) -> Iterator[None]:
    """A client at each, until after the block, and after a node was killed."""
    enough = Event()

    def ask(node: JoiningNode) -> int:
        after = 0
        while not enough.is_set() or not after:
            late = killed.is_set()
            seen.append(vectors(node))
            after += late
            enough.wait(PAUSE_S)
        return after

    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(ask, node) for node in nodes]
        try:
            yield
        finally:
            killed.set()
            enough.set()
        assert all(each.result() for each in asked)


def test_every_node_answers_with_the_model_that_a_request_names(mesh: Mesh) -> None:
    mesh.until_whole()
    assert len({said(node) for node in mesh.running}) == 1
    assert len({code(node) for node in mesh.running}) == 1
    found = [vectors(node) for node in mesh.running]
    assert found[0].shape == (2, HIDDEN)
    assert not are_equal(*found[0])
    assert all(are_equal(found[0], each) for each in found)
    for node in mesh.running:
        listed = node.ask("/v1/models").json()["data"]
        gives = {each["id"]: each["architecture"]["output_modalities"] for each in listed}
        assert gives == {"story": ["text"], "coder": ["text"], "embedder": ["embeddings"]}, node.name


@pytest.mark.parametrize("victim", sampled(["story", "embedder"], "story"))
def test_embeddings_and_a_story_go_on_when_a_host_is_killed(mesh: Mesh, victim: str) -> None:
    mesh.until_whole()
    assert mesh.host("story") is not mesh.host("embedder"), "there is no memory for both on one node"
    expected, embedded, written = said(mesh.client), vectors(mesh.client), code(mesh.client)
    host, killed, seen = mesh.host(victim), Event(), list[Any]()
    survivors = [node for node in mesh.running if node is not host]
    with (
        asking_for_embeddings(survivors, seen, killed),
        mesh.client.stream("/v1/chat/completions", {**STORY, "stream": True}) as stream,
    ):
        chunks = stream.data()
        told = [next(chunks) for _ in range(6)]
        host.signal(signal.SIGKILL)
        host.process.wait(30)
        killed.set()
        told += chunks
    assert (told[-1], text_in(told[:-1])) == ("[DONE]", expected)
    assert all(are_equal(embedded, each) for each in seen)
    mesh.until_serving()
    assert {code(node) for node in mesh.running} == {written}


def text_in(chunks: Iterable[str]) -> str:
    return "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in chunks)
