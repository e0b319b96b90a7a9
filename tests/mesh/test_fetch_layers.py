"""Nodes without the model's file that are to be workers: they fetch their layers, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import stand_ins, tiny_gguf
from tests.support.joining import PLAN, TEXT, JoiningNode, Lab, lab, left_out

LAYERS = 16
SIZES = {"layers": LAYERS, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_size": 64, "feed_forward": 2816}
PIECE_BYTES = 8 << 20
CHATTER_BYTES = 4 << 20
"""That two nodes exchange beside the file: a manifest, samples, gossip, activations of a few tokens."""


@pytest.fixture(scope="module")
def model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred megabytes: one that is worth to be fetched in part."""
    return tiny_gguf.write_large(tmp_path_factory.mktemp("models") / "big.gguf", "Q8_0", **SIZES)


@pytest.fixture(scope="module")
def text(model: Path) -> list[Any]:
    """What the model answers on one node."""
    with lab(model) as nodes:
        return answer_of(nodes.create("alone"))


@pytest.fixture
def nodes(model: Path) -> Iterator[Lab]:
    with lab(model) as nodes:
        yield nodes


def answer_of(node: JoiningNode) -> list[Any]:
    reply = node.ask("/v1/completions", TEXT)
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json()["choices"]]


def create(nodes: Lab, name: str, layers: str) -> JoiningNode:
    """One whose plan waits for somebody else."""
    node = nodes.start(name, "--model", nodes.model, *PLAN, "--layers", layers)
    node.until_said("Invite token: ")
    return node


def join(nodes: Lab, name: str, inviter: JoiningNode, folder: Path, *options: str) -> JoiningNode:
    return nodes.start(name, "--join", inviter.token(), *options, models=folder)


def received_bytes(node: JoiningNode, source: str) -> int:
    """Over the wire, from one that it is connected to."""
    entries = {entry["name"]: entry for entry in node.status()["mesh"]["nodes"]}
    return int(entries[source]["link"]["received_bytes"])


def until_received(node: JoiningNode, source: str, at_least: int) -> int:
    """The same, once it is so much: connections are looked at once a second."""
    node.until(
        lambda: received_bytes(node, source) >= at_least, what=f"{at_least} bytes from {source} are counted"
    )
    return received_bytes(node, source)


def part_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with the holes, and what is said to be in it."""
    assert list(folder.glob("*.gguf")) == [], "that is where whole models are"
    (path,) = folder.glob(".layers/.incoming-fetch-*/*.gguf")
    return path, json.loads((path.parent / "layers.json").read_text())


def held_bytes(said: dict[str, Any]) -> int:
    return sum(PIECE_BYTES * (last - first) for first, last in said["held"][0])


def share_bytes(model: Path, layers: int) -> int:
    return model.stat().st_size * layers // LAYERS


@pytest.mark.full
def test_a_worker_fetches_its_layers_and_no_more(nodes: Lab, text: list[Any], tmp_path: Path) -> None:
    whole = nodes.model.stat().st_size
    one = create(nodes, "one", "one=0-11,two=12-15")
    two = join(nodes, "two", one, tmp_path)
    two.until_plan(("one", 0, 12), ("two", 12, 16))
    assert answer_of(two) == answer_of(one) == text
    assert one.status()["engine"]["weights_sent_bytes"] == 0

    path, said = part_of(tmp_path)
    assert path.stat().st_size == whole
    # The header's piece, and those that the four layers lie in, which begin and end with others'.
    assert share_bytes(nodes.model, 4) < held_bytes(said) <= share_bytes(nodes.model, 4) + 3 * PIECE_BYTES
    assert path.stat().st_blocks * 512 < whole / 2
    came = until_received(two, "one", share_bytes(nodes.model, 4))
    assert came < held_bytes(said) + CHATTER_BYTES
    assert came < whole / 2
    models = {entry["name"]: entry["models"] for entry in one.status()["mesh"]["nodes"]}
    assert models == {"one": ["big"], "two": []}

    # A restart finds what is there: no piece is fetched, and the answer is the same.
    two.stop()
    stamp = path.stat().st_mtime_ns
    two = nodes.start("two", models=tmp_path)
    two.until_plan(("one", 0, 12), ("two", 12, 16))
    assert answer_of(two) == text
    assert received_bytes(two, "one") < CHATTER_BYTES
    assert path.stat().st_mtime_ns == stamp

    # Another plan: only what it adds is fetched.
    one.stop()
    one = create(nodes, "one", "one=0-9,two=10-15")
    two.until_plan(("one", 0, 10), ("two", 10, 16))
    assert answer_of(two) == text
    again, grown = part_of(tmp_path)
    assert (again, again.stat().st_size) == (path, whole)
    added = held_bytes(grown) - held_bytes(said)
    assert share_bytes(nodes.model, 2) - PIECE_BYTES < added <= share_bytes(nodes.model, 2) + 2 * PIECE_BYTES
    assert received_bytes(two, "one") < added + CHATTER_BYTES


@pytest.mark.full
def test_a_worker_fetches_for_all_its_devices(nodes: Lab, text: list[Any], tmp_path: Path) -> None:
    one = create(nodes, "one", "one=0-7,two=8-15")
    options = ("--join", one.token(), "--hosting", "never")
    two = nodes.start("two", *options, models=tmp_path, program=(*stand_ins.COMMAND, "70000000,70000000"))
    status = two.until_status(lambda status: status["node"]["state"] == "serving", what="it serves")

    assert len(status["plan"]["stages"]) > 2
    assert answer_of(two) == answer_of(one) == text
    _, said = part_of(tmp_path)
    assert held_bytes(said) <= share_bytes(nodes.model, 8) + 3 * PIECE_BYTES
    assert "by another node" not in two.stdout + two.stderr


@pytest.mark.full
def test_the_mesh_serves_while_a_new_worker_fetches(nodes: Lab, text: list[Any], tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    two = join(nodes, "two", one, tmp_path)
    one.until_plan(("one", 0, 8), ("two", 8, 16))
    assert answer_of(one) == text
    _, said = part_of(tmp_path)
    assert held_bytes(said) <= share_bytes(nodes.model, 8) + 3 * PIECE_BYTES
    assert received_bytes(two, "one") < held_bytes(said) + CHATTER_BYTES
    # It has nothing to offer to the next one, and cannot host: whoever could is gone.
    one.stop()
    two.until_status(
        lambda s: s["node"]["reason"] == "no node here has all of the model big", what="two waits for a host"
    )
    one = nodes.start("one", "--model", nodes.model, *PLAN, "--split", "--hosting", "prefer")
    two.until_plan(("one", 0, 8), ("two", 8, 16))
    assert answer_of(two) == text


@pytest.mark.full
def test_no_fetch_refuses_layers_too(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split", "--hosting", "prefer")
    two = join(nodes, "two", one, tmp_path, "--no-fetch")
    two.until_ready()
    one.until_status(lambda s: left_out(s).get("two") == "no such model file", what="two is left out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_one_who_wants_to_host_fetches_all_of_it(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split")
    two = join(nodes, "two", one, tmp_path, "--hosting", "prefer")
    two.until_plan(("two", 0, 8), ("one", 8, 16))
    assert [path.name for path in tmp_path.iterdir()] == ["big.gguf"]
    assert (tmp_path / "big.gguf").read_bytes() == nodes.model.read_bytes()
