"""A model that sees, in a mesh: its projector goes to all that may host, and answers outlive losses."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import JoiningNode, Lab, lab, write_model
from tests.support.pictures import url
from tests.support.recovery import Listener

HIDDEN = 64
PROJECTOR = "mmproj-tiny-f16"
TOKENS = 300
"""The blow falls while the sixth of them is told: a tiny model makes several hundred a second."""


@pytest.fixture
def nodes(libraries: dict[str, Path], tmp_path: Path) -> Iterator[Lab]:
    model = write_model(tmp_path / "one", hidden=HIDDEN)
    tiny_gguf.write_projector(model.with_name(f"{PROJECTOR}.gguf"), hidden=HIDDEN)
    with lab(model) as nodes:
        yield nodes


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    """What a picture shows, and how likely each token was."""
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": url(99)}}]
    exact = {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 1, "stream": True}
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": tokens, **exact, **more}


def heard(node: JoiningNode, tokens: int, **blow: Any) -> Listener:
    listener = Listener(node, asked(tokens), **({"do": lambda: None} | blow))
    listener.start()
    listener.finished()
    return listener


def lacking(status: dict[str, Any]) -> dict[str, list[str]]:
    return {node["name"]: node["lacks"] for node in status["mesh"]["nodes"] if node["lacks"]}


def killed(node: JoiningNode) -> Callable[[], None]:
    return lambda: node.signal(signal.SIGKILL)


@pytest.mark.full
def test_the_next_host_sees_and_goes_on_with_the_same_words(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    two = nodes.join("two", one, models=tmp_path / "two")
    three = nodes.join("three", one, models=tmp_path / "three")
    three.until_status(
        lambda status: len({stage["node"] for stage in (status["plan"] or {"stages": ()})["stages"]}) == 3,
        what="all compute",
    )
    for name in ("two", "three"):
        copy = tmp_path / name / f"{PROJECTOR}.gguf"
        two.until(copy.exists, what=f"{name} has the projector")
        assert copy.read_bytes() == nodes.model.with_name(copy.name).read_bytes()
    one.until_status(lambda status: not lacking(status), what="nobody lacks anything")

    undisturbed = heard(two, TOKENS)
    assert undisturbed.outcome.done, undisturbed.outcome
    # Three stages, then the two that are left, with the projector that was fetched.
    for blow in (one.engine().kill, killed(one)):
        struck = heard(two, TOKENS, at=6, do=blow)
        assert struck.outcome.at_seam, "it was over before"
        assert struck.outcome.pieces == undisturbed.outcome.pieces
        assert struck.chances == undisturbed.chances


@pytest.mark.full
def test_a_host_without_the_projector_says_so(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    write_model(tmp_path / "two", hidden=HIDDEN)
    two = nodes.join("two", one, "--no-fetch", models=tmp_path / "two")
    two.until_plan(("one", 0, 15), ("two", 15, 30))
    status = one.until_status(lambda status: lacking(status) == {"two": [PROJECTOR]}, what="two lacks it")
    assert [node["models"] for node in status["mesh"]["nodes"]] == [["tiny"], ["tiny"]]
    shown = mesh_llm("status", "--home", one.home).stdout
    assert ["two", PROJECTOR] in [line.split() for line in shown.splitlines()]

    struck = heard(two, TOKENS, at=6, do=killed(one))
    assert not struck.outcome.done
    assert struck.outcome.error is not None
    assert struck.outcome.error["code"] == "not_resumed"
    blind = "image input is not supported"
    assert struck.outcome.error["message"].startswith(f"the next engine cannot go on: {blind}")
    two.until_plan(("two", 0, 30))
    reply = two.ask("/v1/chat/completions", asked(4, stream=False))
    assert reply.status == 400
    assert reply.json()["error"]["message"].startswith(blind)
