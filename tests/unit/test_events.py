"""Every kind of event that a node tells is in the documents: programs read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def kinds(tree: ast.Module) -> Iterator[str]:
    """By their words, where an event is made or told."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        told = node.args[:1] if called in ("say", "_say", "remark") and len(node.args) == 2 else []
        named = [each.value for each in node.keywords if each.arg == "kind"] if called == "Event" else []
        yield from (
            each.value
            for each in (*told, *named)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )


def test_every_kind_is_documented() -> None:
    package = ROOT / "src" / "mesh_llm"
    # Those who fetch models have a `say` of their own, with no kinds.
    sources = (path for path in package.rglob("*.py") if path.parent.name != "peer_fetch")
    found = {kind for source in sources for kind in kinds(ast.parse(source.read_text("utf-8")))}
    # By a table of words, in announcements.py.
    found |= {"api", "agent", "agent-goose", "fetch"}
    page = (
        (ROOT / "docs" / "operations.md").read_text("utf-8").split("## Logs and events")[1].split("\n## ")[0]
    )
    listed = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))

    assert {"plan", "arrived", "lost", "elected"} <= found
    assert listed == found
