"""Which mesh this node belongs to, by what right, and whom it may let in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mesh_llm.defaults import REVOKED_LIMIT
from mesh_llm.errors import CredentialRefused, MeshError
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.admissions import Admissions
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.identity import Identity, is_node_id
from mesh_llm.types import MeshId, NodeId, Role

_FIELDS = {"mesh", "credential", "revoked", "invites"}


@dataclass(slots=True, kw_only=True)
class Membership:
    """Changes as the node joins, invites and revokes; whoever owns the home writes it down."""

    mesh: MeshId | None = None
    """None until the node has joined one: until then it admits nobody."""
    credential: Credential = ()
    revoked: set[str] = field(default_factory=set)
    admissions: Admissions = field(default_factory=Admissions)

    @classmethod
    def create(cls, identity: Identity) -> Membership:
        """A new mesh, whose creator this node is."""
        return cls(mesh=MeshId(identity.id))

    def adopt(self, mesh: MeshId, credential: Credential) -> None:
        """Become a member of `mesh`; what belonged to another one goes."""
        if mesh != self.mesh:
            self.revoked = set()
            self.admissions = Admissions()
        self.mesh, self.credential = mesh, credential

    def role(self, node: NodeId) -> Role:
        """This node's own; `CredentialRefused` when it is no member (any more)."""
        if self.mesh is None:
            raise CredentialRefused("this node has joined no mesh", hint="mesh-llm --join TOKEN")
        return credentials.check(self.credential, self.mesh, node, self.revoked)

    def add_revoked(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that are news; malformed ones, and more than can be kept, are left out."""
        known = {id for id in ids if credentials.is_invite_id(id)} - self.revoked
        news = set(sorted(known)[: max(0, REVOKED_LIMIT - len(self.revoked))])
        self.revoked |= news
        return news

    # -- documents -------------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        """For the home, where it is private: invites' secrets are in it."""
        return {
            "mesh": self.mesh,
            "credential": credentials.to_document(self.credential),
            "revoked": sorted(self.revoked),
            "invites": self.admissions.to_document(),
        }

    @classmethod
    def from_document(cls, document: Any) -> Membership:
        try:
            if not isinstance(document, dict) or set(document) != _FIELDS:
                raise ValueError("missing or unknown fields")
            mesh, revoked = document["mesh"], document["revoked"]
            if mesh is not None and not is_node_id(mesh):
                raise ValueError("the mesh's id is malformed")
            if not isinstance(revoked, list) or not all(map(credentials.is_invite_id, revoked)):
                raise ValueError("the revoked invites are malformed")
            return cls(
                mesh=mesh,
                credential=credentials.from_document(document["credential"]),
                revoked=set(revoked),
                admissions=Admissions.from_document(document["invites"]),
            )
        except (ValueError, CredentialRefused) as error:
            raise MeshError(f"the record of this node's mesh is damaged: {error}") from error
