"""What makes a node a member: a chain of grants from the mesh's creator down to it.

The mesh's id is its creator's public key. Each grant is signed by the one who let the node in and names
the invite by which it came; it also covers the grant before it, so that a chain cannot be put together
from pieces of others. Nobody needs to be asked: whoever knows the mesh's id can check a chain.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mesh_llm.defaults import CREDENTIAL_CHAIN_LIMIT
from mesh_llm.errors import CredentialRefused
from mesh_llm.transport.identity import SIGNATURE_BYTES, Identity, is_node_id, verify
from mesh_llm.types import MeshId, NodeId, Role

_INVITE_ID = re.compile("[0-9a-f]{16}")
_SIGNATURE = re.compile(f"[0-9a-f]{{{2 * SIGNATURE_BYTES}}}")
_FIELDS = {"node", "role", "invite", "issuer", "signature"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    node: NodeId
    role: Role
    invite: str
    issuer: NodeId
    signature: bytes


Credential = tuple[Grant, ...]
"""From the creator's grant to the holder's; the creator's own is empty."""


def is_invite_id(value: object) -> bool:
    return isinstance(value, str) and _INVITE_ID.fullmatch(value) is not None


def extend(credential: Credential, identity: Identity, node: NodeId, role: Role, invite: str) -> Credential:
    """The credential of a node that `identity`, the holder of `credential`, lets in."""
    if len(credential) >= CREDENTIAL_CHAIN_LIMIT:
        raise CredentialRefused(
            f"this node is {len(credential)} invites away from the mesh's creator and cannot invite others",
            hint="make the invite on a node nearer to the creator",
        )
    if credential and credential[-1].role is Role.CLIENT:
        raise CredentialRefused("a client cannot invite others", hint="make the invite on a node of the mesh")
    mesh = MeshId(credential[0].issuer if credential else identity.id)
    message = _signed(mesh, credential, node, role, invite, identity.id)
    grant = Grant(node=node, role=role, invite=invite, issuer=identity.id, signature=identity.sign(message))
    return (*credential, grant)


def check(credential: Credential, mesh: MeshId, node: NodeId, revoked: Collection[str]) -> Role:
    """The role of `node` in `mesh` by this credential; `CredentialRefused` where it has none."""
    if len(credential) > CREDENTIAL_CHAIN_LIMIT:
        raise CredentialRefused("the credential is longer than a chain of invites may be")
    if (credential[-1].node if credential else mesh) != node:
        raise CredentialRefused("the credential belongs to another node or another mesh")
    issuer = NodeId(mesh)
    role = Role.NODE
    for index, grant in enumerate(credential):
        if grant.issuer != issuer:
            raise CredentialRefused("the credential does not go back to this mesh's creator")
        if role is Role.CLIENT:
            raise CredentialRefused("the credential was issued by a client, which cannot invite")
        message = _signed(mesh, credential[:index], grant.node, grant.role, grant.invite, grant.issuer)
        if not verify(grant.issuer, message, grant.signature):
            raise CredentialRefused("the credential's signature is wrong")
        issuer, role = grant.node, grant.role
    if hit := next((grant.invite for grant in credential if grant.invite in revoked), None):
        raise CredentialRefused(
            f"the invite {hit} was revoked, and with it the membership of those who came in by it",
            hint="ask a member of the mesh for a new invite",
        )
    return role


def _signed(mesh: MeshId, before: Credential, node: NodeId, role: Role, invite: str, issuer: NodeId) -> bytes:
    # Every field has one length for each role, so that no two grants have the same bytes.
    previous = before[-1].signature if before else bytes(SIGNATURE_BYTES)
    ids = bytes.fromhex(mesh) + previous + bytes.fromhex(issuer) + bytes.fromhex(node)
    return b"mesh-llm grant 1\0" + ids + bytes.fromhex(invite) + role.encode()


# -- documents -----------------------------------------------------------------------------------


def to_document(credential: Credential) -> list[dict[str, str]]:
    return [
        {
            "node": grant.node,
            "role": grant.role.value,
            "invite": grant.invite,
            "issuer": grant.issuer,
            "signature": grant.signature.hex(),
        }
        for grant in credential
    ]


def from_document(document: Any) -> Credential:
    """Its shape is checked here; what it claims, by `check`."""
    if not isinstance(document, list) or len(document) > CREDENTIAL_CHAIN_LIMIT:
        raise CredentialRefused("the credential is not a list of grants")
    return tuple(_grant(entry) for entry in document)


def _grant(entry: Any) -> Grant:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise CredentialRefused("a grant in the credential has missing or unknown fields")
    signature = entry["signature"]
    if not (
        is_node_id(entry["node"])
        and is_node_id(entry["issuer"])
        and is_invite_id(entry["invite"])
        and entry["role"] in (Role.NODE.value, Role.CLIENT.value)
        and isinstance(signature, str)
        and _SIGNATURE.fullmatch(signature)
    ):
        raise CredentialRefused("a grant in the credential is malformed")
    return Grant(
        node=NodeId(entry["node"]),
        role=Role(entry["role"]),
        invite=entry["invite"],
        issuer=NodeId(entry["issuer"]),
        signature=bytes.fromhex(signature),
    )
