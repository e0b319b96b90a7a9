"""Whose share of an engine a node's requests take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mesh_llm.node.mesh import Mesh
from mesh_llm.transport.network import Network
from mesh_llm.types import NodeFacts, NodeId, Role

ME, NODE, CLIENT, TWIN, OTHER = (NodeId(letter * 64) for letter in "abcde")


def peer(role: Role, *invites: str) -> Any:
    return SimpleNamespace(role=role, credential=tuple(SimpleNamespace(invite=invite) for invite in invites))


def test_all_who_came_in_by_one_clients_token_are_one() -> None:
    facts = NodeFacts(name="me", role=Role.NODE, version="1")
    mesh = Mesh(ME, facts, incarnation=1, on_change=lambda: None, on_refused=lambda node, reason: None)
    peers = {
        NODE: peer(Role.NODE, "first", "second"),
        CLIENT: peer(Role.CLIENT, "first", "third"),
        TWIN: peer(Role.CLIENT, "first", "third"),
        OTHER: peer(Role.CLIENT, "first", "fourth"),
    }
    mesh.attach(cast(Network, SimpleNamespace(peers=peers)), {})
    assert mesh.account_of(NODE) == NODE
    assert mesh.account_of(CLIENT) == mesh.account_of(TWIN) == "client:third"
    assert mesh.account_of(OTHER) == "client:fourth"
    # Behind another node, and not known better than by its id.
    assert mesh.account_of(NodeId("f" * 64)) == "f" * 64
