"""Members who sign things: a creator, and chains of invites below it."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.transport.claims import Claim, sign
from mesh_llm.transport.credential import Credential, extend
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.revocations import Revocations, revocation_text
from mesh_llm.types import MeshId, NodeId, Role, Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A node, by what right it is a member, and what it can say."""

    identity: Identity
    mesh: MeshId
    credential: Credential = ()

    @property
    def id(self) -> NodeId:
        return self.identity.id

    @property
    def invite(self) -> str:
        """By which it came in."""
        return self.credential[-1].invite

    def invites(self, number: int, role: Role = Role.NODE, *, invite: str | None = None) -> Person:
        """Somebody whom it lets in; `number` makes the key, and the invite's id."""
        identity = identity_of(number)
        credential = extend(
            self.credential, self.mesh, self.identity, identity.id, role, invite or f"{number:016x}"
        )
        return Person(identity=identity, mesh=self.mesh, credential=credential)

    def says(self, claim: Claim, text: str) -> Signed:
        return sign(self.identity, self.mesh, self.credential, claim, text)

    def revokes(self, invite: str) -> Signed:
        return self.says(Claim.REVOCATION, revocation_text(invite))

    def membership(self) -> Membership:
        return Membership(mesh=self.mesh, credential=self.credential, revocations=Revocations(self.mesh))


def identity_of(number: int) -> Identity:
    return Identity.from_secret(number.to_bytes(32, "big"))


def creator(number: int = 1) -> Person:
    identity = identity_of(number)
    return Person(identity=identity, mesh=MeshId(identity.id))
