"""Writes the reference of docs/troubleshooting.md: every error message of the package, with its hint.

`make fmt` runs it; tests/unit/test_docs.py fails where the page is out of date.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages: tools/error_messages.py -->\n", "<!-- /messages -->\n"

GROUPS: dict[str, tuple[str, ...]] = {
    "Options": ("UsageError",),
    "Models and memory": ("ModelError", "ModelDoesNotFit"),
    "Downloads": ("DownloadFailed",),
    "Invites and joining": ("JoinRefused", "InviteRefused", "CredentialRefused", "Expelled"),
    "Links between nodes": ("LinkRefused", "LinkFailed", "PeerLost", "NodeUnreachable"),
    "The engine": ("EngineMissing", "EngineFailed", "EngineRefused", "BuildFailed"),
    "Agents": ("AgentConfigRefused",),
    "This machine and its node": ("MeshError", "HomeInUse", "PortInUse", "NodeNotRunning"),
}
ADVICE = {
    "Options": "`mesh-llm --help` lists options; nothing was started.",
    "Models and memory": "`mesh-llm models` lists what is here and whether it fits; "
    "`mesh-llm plan --model NAME` shows why.",
    "Downloads": "What was downloaded is kept: the same command continues.",
    "Invites and joining": "`mesh-llm invite` on a member makes a new token; "
    "`mesh-llm status` there shows who is in.",
    "Links between nodes": "The mesh tries again by itself and plans without a node that stays away; "
    "`mesh-llm status` shows the links.",
    "The engine": "The node starts it again by itself; its log is in `~/.mesh-llm/logs`. "
    "`mesh-llm engine info` shows what is installed.",
    "Agents": "Nothing was changed in the agent's settings.",
    "This machine and its node": "`mesh-llm status` shows the state of the running node.",
}


def messages(package: Path) -> dict[str, dict[str, str]]:
    """By group: each message, with its hint or nothing."""
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(package.rglob("*.py")):
        for name, call in _calls(ast.parse(path.read_text("utf-8"))):
            said = _text(call.args[0]) if name in group_of and call.args else None
            if said and said.strip("…; "):
                found[group_of[name]].setdefault(said, _hint(call))
    return found


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def _hint(call: ast.Call) -> str:
    return next((_text(word.value) or "" for word in call.keywords if word.arg == "hint"), "")


def _text(value: ast.expr) -> str | None:
    """A literal's text, with … for what is filled in."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in value.values)
    return None


def reference(package: Path) -> str:
    found = messages(package)
    parts = []
    for group in GROUPS:
        rows = [f"| {_cell(said)} | {_cell(hint)} |" for said, hint in sorted(found[group].items())]
        head = [f"### {group}", "", ADVICE[group], "", "| message | what to do |", "| --- | --- |"]
        parts.append("\n".join([*head, *rows]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def page(text: str, package: Path) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + reference(package) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), ROOT / "src" / "mesh_llm"), "utf-8")
