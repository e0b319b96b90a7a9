"""The invites that this node gave out, and whether a proof of one's secret holds."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.transport.credential import is_invite_id
from mesh_llm.transport.identity import is_node_id
from mesh_llm.transport.invite import EXPIRES_LIMIT, ID_BYTES, SECRET_BYTES
from mesh_llm.types import NodeId, Role

INVITES_LIMIT = 1000
"""Given out by one node; more means that something makes them in a loop."""
INVITE_NODES = 64
"""Ids that are kept of those who came in by an invite."""


_FIELDS = {"id", "secret", "role", "issued", "expires", "revoked", "uses", "limit", "nodes"}


@frozen
class IssuedInvite:
    id: str
    secret: bytes = field(repr=False)
    role: Role
    issued: int
    """Unix time, as `expires`."""
    expires: int | None
    revoked: bool = False
    uses: int = 0
    """Nodes that came in by it."""
    limit: int | None = None
    """So many may."""
    nodes: tuple[NodeId, ...] = ()
    """The last that did: one that comes again by the same token is counted once."""

    def state(self, now: float) -> str:
        """As `invite list` shows it."""
        if self.revoked:
            return "revoked"
        if self.expires is not None and now >= self.expires:
            return "expired"
        return "used" if self.limit is not None and self.uses >= self.limit else "open"

    def admits(self, node: NodeId) -> bool:
        """Whether it has a use left for that node."""
        return self.limit is None or self.uses < self.limit or node in self.nodes


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    """Not ours, or not its secret: which of them is not for a stranger to know."""
    EXPIRED = "expired"
    REVOKED = "revoked"
    USED = "used"


def proof(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    """Of knowing an invite's secret, for one connection and one direction."""
    return hmac.new(secret, b"mesh-llm " + label + b" 1\0" + transcript, hashlib.sha256).digest()


class Admissions:
    def __init__(self, invites: tuple[IssuedInvite, ...] = ()) -> None:
        self._invites = {invite.id: invite for invite in invites}
        # A proof for an invite that does not exist is checked against this: it takes as long.
        self._nobody = secrets.token_bytes(SECRET_BYTES)

    def invites(self) -> tuple[IssuedInvite, ...]:
        """The oldest first."""
        return tuple(self._invites.values())

    def get(self, id: str) -> IssuedInvite | None:
        return self._invites.get(id)

    def issue(
        self, *, role: Role, now: float, lifetime_s: float | None, limit: int | None = None
    ) -> IssuedInvite:
        expires = None if lifetime_s is None else int(now + lifetime_s)
        if expires is not None and not now < expires < EXPIRES_LIMIT:
            raise MeshError("an invite's lifetime must be a second or more, and end before 2106")
        if len(self._invites) >= INVITES_LIMIT:
            self._forget_oldest_dead(now)
        invite = IssuedInvite(
            id=secrets.token_hex(ID_BYTES),
            secret=secrets.token_bytes(SECRET_BYTES),
            role=role,
            issued=int(now),
            expires=expires,
            limit=limit,
        )
        self._invites[invite.id] = invite
        return invite

    def revoke(self, id: str) -> None:
        """Let nobody else in by it; those of other nodes are theirs to close."""
        if (invite := self._invites.get(id)) is not None:
            self._invites[id] = replace(invite, revoked=True)

    def use(self, id: str, node: NodeId) -> bool:
        """Count `node` in; False where others have used it up meanwhile."""
        invite = self._invites.get(id)
        if invite is None or not invite.admits(node):
            return False
        if node not in invite.nodes:
            nodes = (*invite.nodes, node)[-INVITE_NODES:]
            self._invites[id] = replace(invite, uses=invite.uses + 1, nodes=nodes)
        return True

    def verify(
        self, *, id: str, node: NodeId, label: bytes, transcript: bytes, given: bytes, now: float
    ) -> Verdict:
        """What a stranger's proof is worth. Only one who knows the secret learns why it is of no use."""
        invite = self._invites.get(id)
        secret = self._nobody if invite is None else invite.secret
        right = hmac.compare_digest(proof(secret, label, transcript), given)
        if invite is None or not right:
            return Verdict.WRONG
        state = invite.state(now)
        right = state == "open" or (state == "used" and invite.admits(node))
        return Verdict.RIGHT if right else Verdict(state)

    def _forget_oldest_dead(self, now: float) -> None:
        dead = [invite for invite in self.invites() if invite.state(now) != "open"]
        if not dead:
            raise MeshError(
                f"this node has {INVITES_LIMIT} open invites", hint="revoke some: `mesh-llm invite revoke ID`"
            )
        del self._invites[dead[0].id]

    # -- documents -------------------------------------------------------------------------------

    def to_document(self) -> list[dict[str, Any]]:
        return [
            {
                "id": invite.id,
                "secret": invite.secret.hex(),
                "role": invite.role.value,
                "issued": invite.issued,
                "expires": invite.expires,
                "revoked": invite.revoked,
                "uses": invite.uses,
                "limit": invite.limit,
                "nodes": list(invite.nodes),
            }
            for invite in self.invites()
        ]

    @classmethod
    def from_document(cls, document: Any) -> Admissions:
        """Of a document that this node wrote; ValueError where somebody else had a hand in it."""
        if not isinstance(document, list):
            raise ValueError("invites are a list")
        return cls(tuple(_invite(entry) for entry in document))


def _invite(entry: Any) -> IssuedInvite:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise ValueError("an invite has missing or unknown fields")
    expires = 0 if entry["expires"] is None else entry["expires"]
    if not is_invite_id(entry["id"]) or not isinstance(entry["revoked"], bool):
        raise ValueError("an invite is malformed")
    limit = 1 if entry["limit"] is None else entry["limit"]
    numbers = (entry["issued"], expires, entry["uses"], limit)
    if any(type(value) is not int or value < 0 for value in numbers):
        raise ValueError("an invite's times are malformed")
    if not isinstance(entry["nodes"], list) or not all(map(is_node_id, entry["nodes"])):
        raise ValueError("the nodes that came in by an invite are malformed")
    secret = bytes.fromhex(entry["secret"]) if isinstance(entry["secret"], str) else b""
    if len(secret) != SECRET_BYTES:
        raise ValueError("an invite's secret is malformed")
    return IssuedInvite(
        id=entry["id"],
        secret=secret,
        role=Role(entry["role"]),
        issued=entry["issued"],
        expires=entry["expires"],
        revoked=entry["revoked"],
        uses=entry["uses"],
        limit=entry["limit"],
        nodes=tuple(map(NodeId, entry["nodes"])),
    )
