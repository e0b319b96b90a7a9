"""Nodes without the model's file: they get it from a member, or say that they will not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.joining import TEXT, JoiningNode, Lab, lab, left_out, write_model
from tests.support.node import ENDLESS

PART_BYTES = 4 << 20
LONG = ("--ctx-size", "8192", "--parallel", "2")
LARGE = {"layers": 48, "hidden": 512}
"""Eighty megabytes: a node that answers meanwhile sends them in ten seconds, not at once."""


@pytest.fixture(scope="module")
def model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def large(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large"), name="large.gguf", **LARGE)


@pytest.fixture
def nodes(model: Path) -> Iterator[Lab]:
    with lab(model) as nodes:
        yield nodes


def test_a_node_without_the_file_fetches_it_and_takes_part(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    two = nodes.join("two", one, models=tmp_path / "two")
    two.until_plan(("one", 0, 15), ("two", 15, 30))
    assert (tmp_path / "two" / "tiny.gguf").read_bytes() == nodes.model.read_bytes()
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["tiny.gguf"]
    status = one.status()
    assert status["engine"]["weights_sent_bytes"] == 0
    answer = two.ask("/v1/completions", TEXT).json()["choices"]
    assert answer == one.ask("/v1/completions", TEXT).json()["choices"]
    two.stop()

    # Once is enough, and what it has it gives to others.
    stamp = (tmp_path / "two" / "tiny.gguf").stat().st_mtime_ns
    two = nodes.start("two", models=tmp_path / "two")
    two.until_plan(("one", 0, 15), ("two", 15, 30))
    assert (tmp_path / "two" / "tiny.gguf").stat().st_mtime_ns == stamp


@pytest.mark.full
def test_another_file_of_that_name_is_left_alone(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    other = write_model(tmp_path / "two", seed=7)
    before = other.read_bytes()
    private = write_model(tmp_path / "two", name="private.gguf", seed=8)
    two = nodes.join("two", one, models=tmp_path / "two")
    two.until_plan(("one", 0, 15), ("two", 15, 30))

    # Both were looked at, and no member hears of them.
    status = one.until_status(lambda s: models_of(s)["two"], what="it hears what two has")
    assert len(models_of(status)["two"]) == 1
    assert "private" not in json.dumps(status)
    assert other.read_bytes() == before
    fetched = [path for path in (tmp_path / "two").glob("*.gguf") if path not in (other, private)]
    assert [path.read_bytes() for path in fetched] == [nodes.model.read_bytes()]


def models_of(status: dict[str, Any]) -> dict[str, list[str]]:
    return {entry["name"]: entry["models"] for entry in status["mesh"]["nodes"]}


@pytest.mark.full
def test_a_source_that_dies_in_the_middle_is_replaced_and_answers_go_on(large: Path, tmp_path: Path) -> None:
    with lab(large) as nodes:
        one = nodes.start("one", "--model", large, *LONG).until_ready()
        two = nodes.join("two", one)
        one.until_nodes("one", "two")
        # Several tries: a file may be there as a whole before this process has its next turn.
        for name in ("three", "four", "five"):
            folder = tmp_path / name
            three, source = held_in_the_middle(nodes, name, folder, one, two)
            if in_the_middle := written_bytes(folder) < large.stat().st_size / 2:
                break
            three.signal(signal.SIGCONT)
            three.stop()
        assert in_the_middle, "it was too fast to be disturbed"
        source.signal(signal.SIGKILL)
        three.signal(signal.SIGCONT)
        source.process.wait(30)
        left = two if source is one else one

        three.until(lambda: (folder / "large.gguf").exists(), what="it has the file", within_s=60)
        assert (folder / "large.gguf").read_bytes() == large.read_bytes()
        three.until_said(f"large from {source.name} (")
        three.until_nodes(left.name, three.name)
        # The dead one may have been the host.
        three.until(lambda: three.ask("/v1/completions", TEXT).status == 200, what="an answer")
        status = left.until_status(lambda s: three.name in left_out(s), what="three is left out")
        # For the right reason: it has the file now.
        left.until_status(
            lambda s: left_out(s).get(three.name, "").startswith(("not needed", "would make it slower")),
            what=f"three could take part: {status['plan']['excluded']}",
        )


def held_in_the_middle(
    nodes: Lab, name: str, folder: Path, one: JoiningNode, two: JoiningNode
) -> tuple[JoiningNode, JoiningNode]:
    """A node that stands still with a part of the file, as a rule, and the one that has sent it."""
    token = one.token()
    with one.stream("/v1/completions", ENDLESS) as answer, two.stream("/v1/completions", ENDLESS):
        # Both are busy now, so that a file takes its time.
        answer.next()
        node = nodes.start(name, "--join", token, "--hosting", "never", models=folder)
        node.until(lambda: source_of(node, one, two), what="some of it has arrived")
        # An answer goes on while the file is on its way.
        for _ in range(20):
            assert json.loads(answer.next())["choices"][0]["finish_reason"] is None
        source = source_of(node, one, two)
        assert source is not None
        node.signal(signal.SIGSTOP)
    return node, source


def written_bytes(folder: Path) -> int:
    """Of a model, whole or not."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(min(file.st_size, file.st_blocks * 512) for file in files)


def source_of(node: JoiningNode, *candidates: JoiningNode) -> JoiningNode | None:
    """Who has sent it a good part of the file; None before somebody has."""
    status = node.status_or_none() or {"mesh": {"nodes": []}}
    received = {entry["name"]: entry["link"]["received_bytes"] for entry in status["mesh"]["nodes"]}
    source = max(candidates, key=lambda candidate: received.get(candidate.name, 0))
    return source if received.get(source.name, 0) > PART_BYTES else None
