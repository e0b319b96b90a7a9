"""What an honest user sees of a node that was attacked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Address, NodeId
from tests.support.joining import TEXT, JoiningNode, Lab
from tests.support.waiting import until

QUICK_S = 30.0
"""For what takes a second on a machine that has nothing else to do."""
SOON_S = 4.0
"""For an attack to show what it does; on a node that bears it, the wait is in vain."""
_STAMP = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ ")
MISTAKES = ("Traceback", "internal error", "failed to serve a stream", "the network failed to")
"""In a log: a mistake of the node's own, which nobody may provoke."""


def soon(condition: Callable[[], object], *, within_s: float = SOON_S) -> bool:
    """Whether it comes to that."""
    try:
        until(condition, within_s=within_s, what="the attack")
    except AssertionError:
        return False
    return True


def comes_to(condition: Callable[[], object], *, expected: bool) -> bool:
    """The same, with more patience where it should."""
    return soon(condition, within_s=QUICK_S if expected else SOON_S)


def id_of(node: JoiningNode) -> NodeId:
    return NodeId(str(node.status()["node"]["id"]))


def address_of(node: JoiningNode) -> Address:
    """From the ports in its home: where a member would dial it."""
    return Address(direct=(f"127.0.0.1:{remembered(node.home)['ports'][0]}",))


def remembered(home: Path) -> dict[str, Any]:
    """What a node knows of its mesh after a restart."""
    document = json.loads((home / "mesh.json").read_text())
    assert isinstance(document, dict)
    return document


def remembers(node: JoiningNode, other: NodeId) -> bool:
    return any(record["id"] == other for record in remembered(node.home)["members"])


def membership(home: Path) -> Membership:
    return Membership.from_document(remembered(home)["membership"], now=time.time())


def is_expelled(home: Path) -> bool:
    """Whether it would say so at its next start."""
    kept = membership(home)
    return kept.revocations.strikes(kept.credential) is not None


def settings_kept(node: JoiningNode) -> MeshSettings:
    """The settings that it goes by after a restart, once they have all that the creator adds to them."""
    node.until(lambda: (found := membership(node.home).settings) and found.digest, what="it has a digest")
    settings = membership(node.home).settings
    assert settings is not None
    return settings


def serves(node: JoiningNode, *, within_s: float = QUICK_S) -> str:
    """The text that a person who asks this node is given."""
    node.until(lambda: (node.status_or_none() or {}).get("api"), what="it has an API", within_s=within_s)
    texts: list[str] = []

    def answered() -> bool:
        # One that has ended refuses the connection, and then says why it ended.
        with suppress(ConnectionError):
            reply = node.ask("/v1/completions", TEXT)
            if reply.status == 200:
                texts.append(str(reply.json()["choices"][0]["text"]))
        return bool(texts)

    node.until(answered, what="it answers a request", within_s=within_s)
    return texts[-1]


def restarted(nodes: Lab, node: JoiningNode, *arguments: str | Path, **options: Any) -> JoiningNode:
    """On the home that it had, without a token."""
    node.stop()
    return nodes.start(node.name, *arguments, **options).until_ready()


def mistakes(node: JoiningNode) -> list[str]:
    """Lines of its log that tell of one, and the last line of each traceback; without time and place."""
    found: list[str] = []
    within = False
    for line in node.logs().splitlines():
        if within and line and not line.startswith((" ", "\t")):
            found.append(line)
            within = False
        within = within or line.startswith("Traceback")
        if any(sign in line for sign in MISTAKES):
            found.append(_STAMP.sub("", line).partition(" peer=")[0])
    return found
