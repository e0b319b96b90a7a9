"""Several models in one mesh: named by requests, changed while it runs, and going on when their hosts die."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import TEXT, JoiningNode, Lab, lab
from tests.support.waiting import until

HEAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An owner with two models, a node that has neither file at first, and a lite client."""

    nodes: Lab
    owner: JoiningNode
    node: JoiningNode
    client: JoiningNode

    def models(self, through: JoiningNode) -> dict[str, dict[str, Any]]:
        status = through.status_or_none()
        return {each["name"]: each for each in status["models"]} if status is not None else {}

    def until_serving(self, *names: str, within_s: float = HEAL_S) -> None:
        """All nodes tell that they serve exactly these, the default one first."""

        def agree() -> bool:
            for each in (self.owner, self.node, self.client):
                found = self.models(each) if each.running else None
                if found is None:
                    continue
                if [*found] != [*names] or any(model["state"] != "serving" for model in found.values()):
                    return False
            return True

        until(agree, within_s=within_s, what=f"{names} are served")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coder")
    return tiny_gguf.write(folder / "coder.gguf", "qwen3", layers=8)


@pytest.fixture(scope="module")
def served(model: Path, coder: Path) -> Iterator[Served]:
    with lab(model) as nodes:
        owner = nodes.create("owner", "--model", coder)
        node = nodes.join("node", owner, models=nodes.folder / "empty")
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        served = Served(nodes=nodes, owner=owner, node=node, client=client)
        served.until_serving("tiny", "coder")
        yield served


def text_of(node: JoiningNode, model: str | None, **more: Any) -> str:
    reply = node.ask("/v1/completions", {**TEXT, **({} if model is None else {"model": model}), **more})
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def test_options_of_the_command_line_hold_for_every_model(served: Served) -> None:
    for each in served.models(served.client).values():
        assert (each["context"], each["slots"]) == (512, 1)


def test_every_node_answers_with_the_model_that_a_request_names(served: Served) -> None:
    through = (served.owner, served.node, served.client)
    texts = {name: {text_of(node, name) for node in through} for name in ("tiny", "coder")}

    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts["tiny"] != texts["coder"]
    assert {text_of(node, None) for node in through} == texts["tiny"]
    listed = served.client.ask("/v1/models").json()["data"]
    assert [(each["id"], each["status"]["value"]) for each in listed] == [
        ("tiny", "loaded"),
        ("coder", "loaded"),
    ]
    unknown = served.client.ask("/v1/completions", {**TEXT, "model": "gpt-4o"})
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_another_default_model_restarts_nothing(served: Served) -> None:
    before = {name: each["host"] for name, each in served.models(served.owner).items()}
    engines = served.owner.status()["engine"]["pid"]

    assert mesh_llm("use", "coder", "--home", served.owner.home).status == 0
    served.until_serving("coder", "tiny")
    assert text_of(served.client, None) == text_of(served.client, "coder")
    assert {name: each["host"] for name, each in served.models(served.node).items()} == before

    assert mesh_llm("use", "tiny", "--home", served.owner.home).status == 0
    served.until_serving("tiny", "coder")
    assert served.owner.status()["engine"]["pid"] == engines


def test_a_model_is_unloaded_and_loaded_again_beside_one_that_answers(served: Served) -> None:
    text = text_of(served.client, "coder")
    endless = {**TEXT, "model": "tiny", "max_tokens": 300, "stream": True}
    with served.client.stream("/v1/completions", endless) as stream:
        chunks = stream.data()
        next(chunks)
        assert mesh_llm("unload", "coder", "--home", served.owner.home).status == 0
        served.until_serving("tiny")
        # One model: every name means it.
        assert text_of(served.client, "coder") == text_of(served.client, "tiny")
        loaded = mesh_llm("load", served.nodes.folder / ".." / "nothing", "--home", served.owner.home)
        assert loaded.status == 1
        options = ("--parallel", "1", "--temp", "0.25", "--top-k", "7")
        assert mesh_llm("load", _coder(served), *options, "--home", served.owner.home).status == 0
        *_, last = chunks
    assert last == "[DONE]"
    served.until_serving("tiny", "coder")
    assert text_of(served.client, "coder") == text
    again = mesh_llm("load", "coder", *options, "--home", served.owner.home)
    assert again.stdout == "coder is served already, as you ask for it\n"
    taken = mesh_llm("load", "coder", "--alias", "tiny", "--home", served.owner.home)
    assert "the mesh serves another model as tiny" in taken.stderr
    told = served.client.ask("/props?model=coder").json()["default_generation_settings"]["params"]
    assert (told["temperature"], told["top_k"]) == (0.25, 7)


def _coder(served: Served) -> Path:
    """As the node fetched it."""
    return served.nodes.folder / "empty" / "coder.gguf"


def test_only_owners_choose_models(served: Served) -> None:
    for verb in (("use", "coder"), ("unload", "coder"), ("load", "coder")):
        refused = mesh_llm(*verb, "--home", served.node.home)
        assert refused.status == 1
        assert "only owners of the mesh choose its models" in refused.stderr
    default = mesh_llm("unload", "tiny", "--home", served.owner.home)
    assert "tiny is the default model of the mesh" in default.stderr
    unknown = mesh_llm("use", "nosuch", "--home", served.owner.home)
    assert "the mesh does not serve nosuch" in unknown.stderr
    assert "it serves tiny, coder" in unknown.stderr


def test_an_answer_of_either_model_goes_on_when_its_host_is_killed(served: Served) -> None:
    """The last one: it takes a node away. These models write no text that could be read again token by token,
    so that only its length is compared; tests/mesh/test_recovery.py compares words."""
    expected = text_of(served.client, "tiny", max_tokens=200)
    hosts = {name: each["host"] for name, each in served.models(served.client).items()}
    ids = {node.status()["node"]["id"]: node for node in (served.owner, served.node)}
    victim = ids[hosts["coder"]]
    question = {**TEXT, "max_tokens": 200, "stream": True, "model": "coder"}
    question["stream_options"] = {"include_usage": True}
    with served.client.stream("/v1/completions", question) as stream:
        chunks = stream.data()
        first = next(chunks)
        victim.signal(signal.SIGKILL)
        victim.process.wait(30)
        *rest, last = chunks
    assert last == "[DONE]"
    assert json.loads(first)["model"] == "coder"
    assert json.loads(rest[-1])["usage"]["completion_tokens"] == 200
    served.until_serving("tiny", "coder")
    assert text_of(served.client, "tiny", max_tokens=200) == expected
