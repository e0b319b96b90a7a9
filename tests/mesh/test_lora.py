"""LoRA adapters in a mesh: whoever computes has a copy of its own, and the text is that of one node alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.joining import TEXT, Lab, lab, left_out, write_model

ADAPTER = "style"


@pytest.fixture
def nodes(libraries: dict[str, Path], tmp_path: Path) -> Iterator[Lab]:
    model = write_model(tmp_path / "one")
    tiny_gguf.write_adapter(model.with_name(f"{ADAPTER}.gguf"), model, rank=16)
    with lab(model) as nodes:
        yield nodes


def said(node: Any, **more: Any) -> str:
    # llama-server takes what it computed with another scale for its own, where a request names none.
    reply = node.ask("/v1/completions", {**TEXT, "cache_prompt": False, **more})
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.full
def test_whoever_computes_fetches_the_adapter(nodes: Lab, tmp_path: Path) -> None:
    adapter = nodes.model.with_name(f"{ADAPTER}.gguf")
    one = nodes.create("one", "--split", "--hosting", "prefer", "--lora-scaled", f"{adapter}:2")
    styled, plain = said(one), said(one, lora=[{"id": 0, "scale": 0}])
    assert styled != plain

    write_model(tmp_path / "three")
    three = nodes.join("three", one, "--no-fetch", models=tmp_path / "three")
    two = nodes.join("two", one, models=tmp_path / "two")
    two.until_plan(("one", 0, 15), ("two", 15, 30))
    assert (tmp_path / "two" / adapter.name).read_bytes() == adapter.read_bytes()
    status = one.status()
    assert status["engine"]["weights_sent_bytes"] == 0
    assert status["model"]["adapters"] == [ADAPTER]
    reason = left_out(one.until_status(lambda status: "three" in left_out(status), what="three is left out"))
    assert reason["three"].startswith(f"lacks the LoRA adapter {ADAPTER}: copy {ADAPTER}.gguf to its models")
    assert {node["name"]: node["lacks"] for node in status["mesh"]["nodes"]}["three"] == [ADAPTER]

    for node in (one, two, three):
        assert (said(node), said(node, lora=[{"id": 0, "scale": 0}])) == (styled, plain)
        (told,) = node.ask("/lora-adapters").json()
        assert (told["id"], told["path"], told["scale"]) == (0, adapter.name, 2)
        assert node.ask("/lora-adapters", [{"id": 0, "scale": 1}]).status == 400

    # The next host has its own copy, too.
    one.stop()
    two.until_plan(("two", 0, 30))
    assert said(two) == styled
