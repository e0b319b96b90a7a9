"""Whose share of an engine a node's requests take."""

from __future__ import annotations

from mesh_llm.peers.trust import Origin
from mesh_llm.transport.credential import Credential, Grant
from mesh_llm.types import NodeId, Role

NODE, CLIENT, TWIN, OTHER = (NodeId(letter * 64) for letter in "bcde")


INVITER, TWO = (NodeId(letter * 64) for letter in "fg")


def credential(node: NodeId, role: Role, *invites: str, by: NodeId = INVITER) -> Credential:
    holders = ([by] * len(invites) + [node])[-len(invites) :] if invites else []
    return tuple(
        Grant(node=holder, role=role, invite=invite, signature=b"")
        for holder, invite in zip(holders, invites, strict=True)
    )


def account(node: NodeId, role: Role, *invites: str) -> str:
    return Origin.of(node, role, credential(node, role, *invites)).account


def test_all_who_came_in_by_one_clients_token_are_one() -> None:
    first, second = (account(node, Role.CLIENT, "first", "third") for node in (CLIENT, TWIN))
    assert first == second
    assert account(OTHER, Role.CLIENT, "first", "fourth") != first
    # An id that another node has chosen for an invite of its own is another invite.
    forged = Origin.of(OTHER, Role.CLIENT, credential(OTHER, Role.CLIENT, "first", "third", by=TWO))
    assert forged.account != first


def test_nodes_are_themselves() -> None:
    assert account(NODE, Role.NODE, "first", "second") == NODE
    assert account(NODE, Role.OWNER) == NODE
