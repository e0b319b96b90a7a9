"""Whose share of an engine a node's requests take."""

from __future__ import annotations

from mesh_llm.node.trust import Origin
from mesh_llm.transport.credential import Credential, Grant
from mesh_llm.types import NodeId, Role

NODE, CLIENT, TWIN, OTHER = (NodeId(letter * 64) for letter in "bcde")


def credential(node: NodeId, role: Role, *invites: str) -> Credential:
    return tuple(Grant(node=node, role=role, invite=invite, signature=b"") for invite in invites)


def account(node: NodeId, role: Role, *invites: str) -> str:
    return Origin.of(node, role, credential(node, role, *invites)).account


def test_all_who_came_in_by_one_clients_token_are_one() -> None:
    first, second = (account(node, Role.CLIENT, "first", "third") for node in (CLIENT, TWIN))
    assert first == second
    assert account(OTHER, Role.CLIENT, "first", "fourth") != first


def test_nodes_are_themselves() -> None:
    assert account(NODE, Role.NODE, "first", "second") == NODE
    assert account(NODE, Role.OWNER) == NODE
