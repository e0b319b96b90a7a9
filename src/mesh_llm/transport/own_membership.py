"""Which mesh this node belongs to, by what right, whom it may let in, and what its owners have claimed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mesh_llm.errors import CredentialRefused, Expelled, Forged, MalformedMessage, MeshError
from mesh_llm.membership.checked_fields import Fields, counts_up_to
from mesh_llm.membership.messages import signed_from_fields, signed_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.admissions import Admissions
from mesh_llm.transport.claims import Claim, sign
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.identity import Identity, is_node_id
from mesh_llm.transport.owners_settings import OwnersSettings, read_settings, settings_text, verified
from mesh_llm.transport.revocations import Revocation, Revocations, revocation_text
from mesh_llm.types import MeshId, NodeId, Role, Signed

SETTINGS_TOLD = 8
"""Owners whose settings are told: those in force, and the next in line should these be revoked."""
OWNERS_LIMIT = 64
"""Whose settings are kept."""


_FIELDS = {"mesh", "credential", "revocations", "settings", "invites"}


@dataclass(slots=True, kw_only=True)
class Membership:
    """Changes as the node joins, invites and revokes; whoever owns the home writes it down."""

    mesh: MeshId | None = None
    """None until the node has joined one: until then it admits nobody."""
    credential: Credential = ()
    revocations: Revocations = field(default_factory=lambda: Revocations(MeshId("")))
    owners: dict[str, OwnersSettings] = field(default_factory=dict)
    """The last word of each owner, by its credential: let in again, it starts anew."""
    admissions: Admissions = field(default_factory=Admissions)

    @classmethod
    def create(cls, identity: Identity) -> Membership:
        """A new mesh, whose creator this node is."""
        mesh = MeshId(identity.id)
        return cls(mesh=mesh, revocations=Revocations(mesh))

    def adopt(self, mesh: MeshId, credential: Credential) -> None:
        """Become a member of `mesh`; what belonged to another one goes."""
        if mesh != self.mesh:
            self.revocations = Revocations(mesh)
            self.owners = {}
            self.admissions = Admissions()
        self.mesh, self.credential = mesh, credential

    def role(self, node: NodeId) -> Role:
        """This node's own; `CredentialRefused` when it is no member, `Expelled` when it is none any more."""
        if self.mesh is None:
            raise CredentialRefused("this node has not joined a mesh", hint="mesh-llm --join TOKEN")
        role = credentials.check(self.credential, self.mesh, node)
        if self.revocations.strikes(self.credential) is not None:
            raise expelled()
        return role

    # -- what owners and inviters claim ------------------------------------------------------------

    def seal(self, identity: Identity, claim: Claim, text: str) -> Signed:
        """Signed by this node, with the right that it has now."""
        assert self.mesh is not None
        return sign(identity, self.mesh, self.credential, claim, text)

    @property
    def settings(self) -> MeshSettings | None:
        """Those in force."""
        chosen = self.in_force
        return chosen.settings if chosen is not None else None

    @property
    def in_force(self) -> OwnersSettings | None:
        return max(self._valid.values(), key=lambda each: each.rank, default=None)

    def set(self, settings: MeshSettings, identity: Identity, *, now: float) -> None:
        """As an owner, which this node has to be."""
        self.take_settings(self.seal(identity, Claim.SETTINGS, settings_text(settings)), now=now)

    def take_settings(self, signed: Signed, *, now: float) -> bool:
        """Verify and keep an owner's settings; whether they are news. `Forged` where they do not hold."""
        assert self.mesh is not None
        known = self.owners.get(signed.credential)
        if known is not None and known.signed == signed:
            return False
        settings = read_settings(signed)
        if known is not None and settings.version < known.settings.version:
            # Not worth a look at its signature.
            return False
        new = verified(signed, settings, self.mesh)
        if known is None and len(self.owners) >= OWNERS_LIMIT:
            self.owners = self._valid
        is_full = known is None and len(self.owners) >= OWNERS_LIMIT
        is_old = known is not None and new.rank <= known.rank
        if is_full or is_old or settings.version > counts_up_to(now):
            return False
        self.owners[signed.credential] = new
        return True

    @property
    def _valid(self) -> dict[str, OwnersSettings]:
        """Without those who are out."""
        strikes = self.revocations.strikes
        return {key: each for key, each in self.owners.items() if strikes(each.signer.credential) is None}

    def revoke(self, invite: str, identity: Identity, issuer: NodeId | None = None) -> None:
        """Sign that an invite, this node's own or `issuer`'s, is taken back; raises without room for it."""
        if not self.revocations.has_room(identity.id, self.credential):
            raise MeshError(
                "this node has revoked as many invites as other nodes keep for it",
                hint="revoke it on the machine that started the mesh, or on another owner's",
            )
        signed = self.seal(identity, Claim.REVOCATION, revocation_text(invite, issuer or identity.id))
        self.revocations.add([signed])
        if not self.revocations.has(signed):
            raise MeshError(
                "no more revocations are kept from members who joined through the same node as this one",
                hint="revoke it on the machine that started the mesh, or on another owner's",
            )
        if issuer in (None, identity.id):
            self.admissions.revoke(invite)

    def take_revocations(self, signed: Iterable[Signed]) -> list[Revocation]:
        return self.revocations.add(signed)

    def claims(self) -> tuple[list[Signed], list[Signed]]:
        """Settings and revocations, for others: of owners who are out nobody needs to hear."""
        valid = sorted(self._valid.values(), key=lambda each: each.rank, reverse=True)
        return [each.signed for each in valid[:SETTINGS_TOLD]], self.revocations.signed

    # -- documents -------------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        """For the home, where it is private: invites' secrets are in it."""
        settings, revocations = self.claims()
        return {
            "mesh": self.mesh,
            "credential": credentials.to_text(self.credential),
            "settings": list(map(signed_to_document, settings)),
            "revocations": list(map(signed_to_document, revocations)),
            "invites": self.admissions.to_document(),
        }

    @classmethod
    def from_document(cls, document: Any, *, now: float) -> Membership:
        try:
            if not isinstance(document, dict) or set(document) != _FIELDS:
                raise ValueError("missing or unknown fields")
            mesh = document["mesh"]
            if not is_node_id(mesh):
                raise ValueError("the mesh's id is malformed")
            found = cls(
                mesh=mesh,
                credential=credentials.from_text(document["credential"]),
                revocations=Revocations(mesh),
                admissions=Admissions.from_document(document["invites"]),
            )
            found.revocations.add(_signed(each) for each in document["revocations"])
            for each in document["settings"]:
                found.take_settings(_signed(each), now=now)
            return found
        except (ValueError, TypeError, CredentialRefused, Forged, MalformedMessage) as error:
            raise MeshError(f"the record of this node's mesh is damaged: {error}") from error


def _signed(document: Any) -> Signed:
    return signed_from_fields(Fields(document, "claim"))


def expelled() -> Expelled:
    return Expelled(
        "this node was expelled from its mesh: its invite was revoked",
        hint="join again with a new token, or start afresh with --new-mesh",
    )
