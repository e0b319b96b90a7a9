"""Nodes that are composed and not run, and what they know of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.lab.simulate.signing import seal
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import Update
from mesh_llm.membership.record import Record, read_record, record_text, told
from mesh_llm.node.node import Node
from mesh_llm.peers.mesh import _now
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.network import Membership, Network, NetworkConfig
from mesh_llm.types import NodeFacts, NodeId, Role

ANN, BEN = NodeId("a" * 64), NodeId("b" * 64)


def a_node(folder: Path, **options: Any) -> Node:
    node = Node(NodeConfig(home=folder, name="here", **options), tell=lambda _: None, progress=lambda _: None)
    node.identity = Identity.from_secret(b"\1" * 32)
    node._new_secret = None
    node._compose()
    # Bound to nothing: it has no peers, and signs what the node says.
    config = NetworkConfig(identity=node.identity, bind_ip="127.0.0.1", no_relay=True)
    node.mesh.attach(Network(config, Membership.create(node.identity), node.mesh), {})
    return node


def admit(node: Node, id: NodeId, *, connected: bool = True, of: NodeId | None = None, **facts: Any) -> None:
    """Make `id` a member; `of`: the one that tells of it."""
    known = NodeFacts(**{"name": id[:3], "role": Role.NODE, "version": "1", **facts})
    view = node.mesh._view
    if connected:
        view.on_connected(id, _now())
    record = Record(node=id, incarnation=5, sequence=0, standing=Standing.ALIVE, facts=known)
    record = replace(record, signed=seal(record_text(record)))
    view._state.open = read_record
    view.on_message(of or id, Update(records=(told(record),)), _now())


def open_doors(monkeypatch: pytest.MonkeyPatch, folder: Path, *nodes: NodeId) -> None:
    """For local links, as these have on this machine, and no others."""
    monkeypatch.setattr("mesh_llm.peers.own_machine.link_door", lambda node: folder / f"{node[:16]}.door")
    for node in nodes:
        (folder / f"{node[:16]}.door").touch()
