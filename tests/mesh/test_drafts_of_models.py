"""Draft models and LoRA adapters of models that are served beside the default one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, Lab, lab
from tests.support.waiting import until


@pytest.fixture
def coder(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=8)


@pytest.fixture
def nodes(model: Path) -> Iterator[Lab]:
    with lab(model) as nodes:
        yield nodes


def load(owner: JoiningNode, *arguments: str | Path) -> None:
    loaded = mesh_llm("load", *arguments, "--home", owner.home)
    assert loaded.status == 0, loaded.stderr


def refusal(owner: JoiningNode, *arguments: str | Path) -> str:
    loaded = mesh_llm("load", *arguments, "--home", owner.home)
    assert loaded.status != 0
    return loaded.stderr


def model_of(node: JoiningNode, name: str) -> dict[str, Any]:
    status = node.status_or_none() or {"models": []}
    return next((model for model in status["models"] if model["name"] == name), {})


def until_drafting(host: JoiningNode, name: str, draft: str | None) -> None:
    """A new engine at `host` has loaded this one."""

    def drafts() -> bool:
        model = model_of(host, name)
        told = model.get("draft") or {"name": "", "drafted": 0}
        return model.get("state") == "serving" and (told["name"], told["drafted"]) == (draft, 0)

    until(drafts, within_s=60, what=f"{draft} drafts for {name}")


def text_of(node: JoiningNode, name: str, **more: Any) -> str:
    reply = node.ask("/v1/completions", {**TEXT, "max_tokens": 48, "model": name, **more})
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def right_guesses(node: JoiningNode, name: str) -> int:
    """Of the draft model."""
    draft = model_of(node, name)["draft"]
    return int(draft["accepted"] - draft["text_accepted"])


def test_a_second_model_gets_a_draft_and_another_one_and_none(
    nodes: Lab, coder: Path, tmp_path: Path
) -> None:
    """Files that lie in no models folder; the default model is left as it is."""
    same = shutil.copy(coder, tmp_path / "same.gguf")
    other = tiny_gguf.write(tmp_path / "other.gguf", "qwen3", layers=2, seed=7)
    owner = nodes.create("owner")
    engine = owner.status()["engine"]["pid"]
    load(owner, coder, *PLAN, "--draft", same, "--draft-max", "4")
    until_drafting(owner, "coder", "same")
    text = text_of(owner, "coder")
    until(lambda: right_guesses(owner, "coder") > 0, within_s=30, what="the draft model's guesses count")

    load(owner, "coder", "--draft", other)
    until_drafting(owner, "coder", "other")
    assert text_of(owner, "coder") == text
    load(owner, "coder", "--no-draft")
    until(lambda: model_of(owner, "coder")["draft"] is None, within_s=60, what="nothing drafts")
    assert text_of(owner, "coder") == text

    wide = tiny_gguf.write(tmp_path / "wide.gguf", "qwen3", layers=2, vocabulary=1024)
    assert "wide cannot draft for coder" in refusal(owner, "coder", "--draft", wide)
    assert "--no-draft disables" in refusal(owner, "coder", "--draft", other, "--no-draft")
    assert owner.status()["engine"]["pid"] == engine


def test_a_host_that_has_the_draft_too_loads_it(nodes: Lab, coder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    draft = tiny_gguf.write(folder / "small.gguf", "qwen3", layers=2, seed=7)
    owner = nodes.create("owner")
    two = nodes.join("two", owner, models=folder)
    load(owner, coder, *PLAN, "--layers", "two=0-7")
    until_drafting(two, "coder", None)
    load(owner, "coder", "--draft", shutil.copy(draft, tmp_path))
    until_drafting(two, "coder", "small")
    assert text_of(owner, "coder")


def test_a_second_model_has_adapters_on_every_node_that_computes(
    nodes: Lab, coder: Path, tmp_path: Path
) -> None:
    style = tiny_gguf.write_adapter(tmp_path / "style.gguf", coder, rank=16)
    strange = tiny_gguf.write_adapter(tmp_path / "strange.gguf", nodes.model)
    owner = nodes.create("owner")
    two = nodes.join("two", owner, models=tmp_path / "two")
    assert "strange.gguf" in refusal(owner, coder, *PLAN, "--lora", strange)
    load(owner, coder, *PLAN, "--no-draft", "--layers", "owner=0-3,two=4-7")

    def serves(*adapters: str) -> bool:
        found = [model_of(node, "coder") for node in (owner, two)]
        return all(
            model.get("state") == "serving" and len(model["nodes"]) == 2 and model["adapters"] == [*adapters]
            for model in found
        )

    until(serves, within_s=60, what="the second model is served by both nodes")
    plain = text_of(two, "coder")
    load(owner, "coder", "--lora-scaled", f"{style}:2")
    until(lambda: serves("style"), within_s=60, what="it is served with its adapter")
    # llama-server takes what it computed with another scale for its own.
    once = {"cache_prompt": False}
    until(lambda: text_of(two, "coder", **once) != plain, within_s=60, what="the adapter counts")
    assert text_of(two, "coder", lora=[{"id": 0, "scale": 0}], **once) == plain
    assert (tmp_path / "two" / style.name).read_bytes() == style.read_bytes()
    assert owner.status()["model"]["adapters"] == []
    nodes_told = {node["name"]: node for node in owner.status()["mesh"]["nodes"]}
    assert (nodes_told["two"]["models"], nodes_told["two"]["lacks"]) == (["tiny", "coder"], [])
