"""Nodes that are updated one by one: old and new ones are one mesh, which answers all the while."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, Lab

PACKAGE = Path(mesh_llm.__file__).parent
NEXT = "99.0.0"


@pytest.fixture
def newer(tmp_path: Path) -> dict[str, str]:
    """The environment of a node whose mesh-llm is a later version."""
    copy = tmp_path / "src" / "mesh_llm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "native").symlink_to(PACKAGE.parents[1] / "native")
    init = copy / "__init__.py"
    text, count = re.subn(r'__version__ = "[^"]+"', f'__version__ = "{NEXT}"', init.read_text("utf-8"))
    assert count == 1
    init.write_text(text, "utf-8")
    return {"PYTHONPATH": str(copy.parent)}


def text_of(node: JoiningNode) -> str:
    reply = node.ask("/v1/completions", TEXT)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def versions(node: JoiningNode) -> dict[str, str]:
    return {member["name"]: member["version"] for member in node.status()["mesh"]["nodes"]}


def test_nodes_are_updated_one_by_one(nodes: Lab, newer: dict[str, str]) -> None:
    old = mesh_llm.__version__
    one = nodes.create("one", "--split")
    two = nodes.join("two", one)
    client = nodes.start("client", "--client", "--join", one.token(role="client")).until_ready()
    one.until_nodes("client", "one", "two")
    one.until_status(lambda status: len(status["plan"]["stages"]) == 2, what="both take part")
    expected = text_of(client)

    two.stop()
    assert text_of(client) == expected
    two = nodes.start("two", env=newer).until_ready()
    one.until_status(lambda status: len(status["plan"]["stages"]) == 2, what="old and new take part")
    assert text_of(client) == expected
    assert versions(one) | versions(two) == {"one": old, "two": NEXT, "client": old}

    one.stop()
    assert text_of(client) == expected
    one = nodes.start("one", "--model", nodes.model, *PLAN, "--split", env=newer).until_ready()
    two.until_status(lambda status: len(status["plan"]["stages"]) == 2, what="both new ones take part")
    assert text_of(client) == expected
    assert versions(client) == {"one": NEXT, "two": NEXT, "client": old}
