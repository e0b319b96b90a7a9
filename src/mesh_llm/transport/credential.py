"""What makes a node a member: a chain of grants from the mesh's creator down to it.

The mesh's id is its creator's public key. Each grant is signed by the one who let the node in and names
the invite by which it came; it also covers the grant before it, so that a chain cannot be put together
from pieces of others. Nobody needs to be asked: whoever knows the mesh's id can check a chain.

As text it is base64url of one piece after the other, each: 32 node | u8 role | 8 invite | 64 signature.
Who issued a grant follows from the one before it; the first one's issuer is the creator.
"""

from __future__ import annotations

import base64
import binascii
import re

from mesh_llm.defaults import CREDENTIAL_CHAIN_LIMIT
from mesh_llm.errors import CredentialRefused
from mesh_llm.frozen import frozen
from mesh_llm.transport.identity import SIGNATURE_BYTES, Identity, verify
from mesh_llm.types import MeshId, NodeId, Role

_INVITE_ID = re.compile("[0-9a-f]{16}")
_ROLES = (Role.NODE, Role.CLIENT, Role.OWNER)
_KEY_BYTES, _INVITE_BYTES = 32, 8
_GRANT_BYTES = _KEY_BYTES + 1 + _INVITE_BYTES + SIGNATURE_BYTES


@frozen
class Grant:
    node: NodeId
    role: Role
    invite: str
    signature: bytes


Credential = tuple[Grant, ...]
"""From the creator's grant to the holder's; the creator's own is empty."""


def is_invite_id(value: object) -> bool:
    return isinstance(value, str) and _INVITE_ID.fullmatch(value) is not None


def role_of(credential: Credential) -> Role:
    """By its last grant; the creator owns its mesh."""
    return credential[-1].role if credential else Role.OWNER


def holder_of(credential: Credential, mesh: MeshId) -> NodeId:
    return credential[-1].node if credential else NodeId(mesh)


def issuers_of(credential: Credential, mesh: MeshId) -> tuple[NodeId, ...]:
    """Of each grant, in order."""
    return (NodeId(mesh), *(grant.node for grant in credential[:-1])) if credential else ()


def origin_of(credential: Credential) -> str:
    """Names the invite by which its holder came in, and who made it: ids alone are anybody's to choose."""
    issuer = credential[-2].node if len(credential) > 1 else "creator"
    return f"{issuer}/{credential[-1].invite}" if credential else issuer


def extend(
    credential: Credential, mesh: MeshId, identity: Identity, node: NodeId, role: Role, invite: str
) -> Credential:
    """The credential of a node that `identity`, the holder of `credential`, lets in."""
    if len(credential) >= CREDENTIAL_CHAIN_LIMIT:
        raise CredentialRefused(
            f"this node is {len(credential)} invites away from the mesh's creator and cannot invite others",
            hint="make the invite on a node nearer to the creator",
        )
    check_may_invite(role_of(credential), role)
    message = _signed(mesh, credential, node, role, invite, identity.id)
    return (*credential, Grant(node=node, role=role, invite=invite, signature=identity.sign(message)))


def check_may_invite(own: Role, role: Role) -> None:
    if own is Role.CLIENT:
        raise CredentialRefused("a client cannot invite others", hint="make the invite on a node of the mesh")
    if role is Role.OWNER and own is not Role.OWNER:
        raise CredentialRefused(
            "only an owner of the mesh can make another owner",
            hint="make the invite on the machine that started the mesh, or on another owner's",
        )


def check(credential: Credential, mesh: MeshId, node: NodeId) -> Role:
    """The role of `node` in `mesh` by this credential; `CredentialRefused` where it has none."""
    if len(credential) > CREDENTIAL_CHAIN_LIMIT:
        raise CredentialRefused("the credential is longer than a chain of invites may be")
    if holder_of(credential, mesh) != node:
        raise CredentialRefused("the credential belongs to another node or another mesh")
    role = Role.OWNER
    for index, (grant, issuer) in enumerate(zip(credential, issuers_of(credential, mesh), strict=True)):
        if role is Role.CLIENT or (grant.role is Role.OWNER and role is not Role.OWNER):
            raise CredentialRefused(f"the credential was issued by a {role}, which cannot do that")
        message = _signed(mesh, credential[:index], grant.node, grant.role, grant.invite, issuer)
        if not verify(issuer, message, grant.signature):
            raise CredentialRefused("the credential's signature is wrong, or it is of another mesh")
        role = grant.role
    return role


def _signed(mesh: MeshId, before: Credential, node: NodeId, role: Role, invite: str, issuer: NodeId) -> bytes:
    # Every field has one length for each role, so that no two grants have the same bytes.
    previous = before[-1].signature if before else bytes(SIGNATURE_BYTES)
    ids = bytes.fromhex(mesh) + previous + bytes.fromhex(issuer) + bytes.fromhex(node)
    return b"mesh-llm grant 1\0" + ids + bytes.fromhex(invite) + role.encode()


# -- text ----------------------------------------------------------------------------------------


def to_text(credential: Credential) -> str:
    return base64.urlsafe_b64encode(b"".join(map(_pack, credential))).rstrip(b"=").decode()


def from_text(text: object) -> Credential:
    """Its shape is checked here; what it claims, by `check`."""
    if not isinstance(text, str):
        raise CredentialRefused("the credential is not a text")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise CredentialRefused("the credential is not base64") from None
    if len(data) % _GRANT_BYTES or len(data) > CREDENTIAL_CHAIN_LIMIT * _GRANT_BYTES:
        raise CredentialRefused("the credential is not a list of grants")
    pieces = (data[start : start + _GRANT_BYTES] for start in range(0, len(data), _GRANT_BYTES))
    credential = tuple(_unpack(piece) for piece in pieces)
    if to_text(credential) != text:
        raise CredentialRefused("the credential is not in canonical form")
    return credential


def _pack(grant: Grant) -> bytes:
    role = bytes([_ROLES.index(grant.role)])
    return bytes.fromhex(grant.node) + role + bytes.fromhex(grant.invite) + grant.signature


def _unpack(piece: bytes) -> Grant:
    role = piece[_KEY_BYTES]
    if role >= len(_ROLES):
        raise CredentialRefused("the credential has a role that this version does not know")
    invite_end = _KEY_BYTES + 1 + _INVITE_BYTES
    return Grant(
        node=NodeId(piece[:_KEY_BYTES].hex()),
        role=_ROLES[role],
        invite=piece[_KEY_BYTES + 1 : invite_end].hex(),
        signature=piece[invite_end:],
    )
