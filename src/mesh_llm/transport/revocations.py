"""Invites that were taken back, and whom that concerns.

A revocation counts for a credential that has the invite, if it was signed by whoever made the invite, by
one above that in the credential's chain, or by an owner. Owners may disagree, and may revoke each other:
the one nearer to the creator is heard first, and whom it has revoked is not heard any more. The creator has
no invite, and cannot be revoked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from mesh_llm.errors import Forged
from mesh_llm.frozen import frozen
from mesh_llm.transport.claims import Claim, holder_of_right, signer_of
from mesh_llm.transport.credential import Credential, is_invite_id, issuers_of, role_of
from mesh_llm.transport.identity import is_node_id
from mesh_llm.types import MeshId, NodeId, Role, Signed

REVOKED_PER_NODE = 256
"""Invites that others keep as revoked on one node's word: a fourth of those that it can have open."""
REVOKED_PER_BRANCH = 512
"""And on the word of all together who came in by one of the creator's own invites."""
REVOKED_PER_OWNER = 512
"""And on an owner's that did not create the mesh."""
REVOKED_IN_ALL = 1536
"""Of a kilobyte and a half at the most: all of them are told to each node that connects, in one go."""


_Key = tuple[str, str, NodeId | None]
"""The right that the signer had, the invite, and who made that: one who became an owner may say it again."""
_TEXT_CHARS = 256
"""An id of 16 digits, and one of 64."""


@frozen
class Revocation:
    invite: str
    issuer: NodeId | None
    """Who made the invite: its id is no more than a number that anybody can choose. None: whoever did."""
    signer: NodeId
    role: Role
    credential: Credential
    """The signer's."""
    signed: Signed

    @property
    def rank(self) -> tuple[int, str]:
        """Whoever is nearer to the creator is heard first."""
        return len(self.credential), self.signer

    @property
    def branch(self) -> str:
        """The creator's own invite by which the signer, or one above it, came in."""
        return self.credential[0].invite if self.credential else ""


def revocation_text(invite: str, issuer: NodeId | None = None) -> str:
    return json.dumps({"revoke": invite} if issuer is None else {"revoke": invite, "issuer": issuer})


def read_revocation(signed: Signed, mesh: MeshId) -> Revocation:
    """`Forged` where it is none, or its signature does not hold."""
    invite, issuer = _named(signed)
    signer = signer_of(signed, mesh, Claim.REVOCATION)
    if signer.role is Role.CLIENT:
        raise Forged("a revocation by a client")
    return Revocation(
        invite=invite,
        issuer=issuer,
        signer=signer.node,
        role=signer.role,
        credential=signer.credential,
        signed=signed,
    )


def _named(signed: Signed) -> tuple[str, NodeId | None]:
    """The invite, and who made it."""
    try:
        document = json.loads(signed.text) if len(signed.text) <= _TEXT_CHARS else None
    except (ValueError, RecursionError):
        document = None
    named = document if isinstance(document, dict) else {}
    invite, issuer = named.get("revoke"), named.get("issuer")
    if is_invite_id(invite) and (issuer is None or is_node_id(issuer)):
        return str(invite), None if issuer is None else NodeId(str(issuer))
    raise Forged("a revocation that names no invite")


class Revocations:
    def __init__(self, mesh: MeshId) -> None:
        self._mesh = mesh
        self._all: dict[_Key, Revocation] = {}
        self._in_force: dict[str, list[Revocation]] = {}
        """By invite."""

    def __len__(self) -> int:
        return len(self._all)

    @property
    def signed(self) -> list[Signed]:
        return [each.signed for each in self._all.values()]

    def add(self, all_signed: Iterable[Signed]) -> list[Revocation]:
        """Verify what is not known yet; returns the news. `Forged` where one does not hold.

        What is beyond its signer's bound is left out, and so is what would count for nothing.
        """
        news = []
        try:
            for signed in all_signed:
                key = (signed.credential, *_named(signed))
                if key not in self._all and (found := self._read(signed)) is not None:
                    self._all[key] = found
                    news.append(found)
        finally:
            if news:
                self._weigh()
        return news

    def _read(self, signed: Signed) -> Revocation | None:
        """Verified, if there is room for it; what needs no signature to be refused is refused before."""
        signer = holder_of_right(signed.credential, self._mesh)
        hit = self.strikes(signer.credential)
        if hit is not None and hit.rank < (len(signer.credential), signer.node):
            return None
        if not self.has_room(signer.node, signer.credential):
            return None
        found = read_revocation(signed, self._mesh)
        return found if self._make_room(found) else None

    def has(self, signed: Signed) -> bool:
        """Whether the signer's word on that invite is known."""
        return (signed.credential, *_named(signed)) in self._all

    def beside(self, signed: Signed) -> Revocations:
        """What would be known with this one, too; `Forged` where it does not hold."""
        found = Revocations(self._mesh)
        found._all, found._in_force = dict(self._all), self._in_force
        found.add([signed])
        return found

    def has_room(self, signer: NodeId, credential: Credential) -> bool:
        """For one more of that signer's, as far as it depends on what that one has revoked itself."""
        own = sum(each.signer == signer for each in self._all.values())
        if not credential:
            return own < REVOKED_IN_ALL
        return own < (REVOKED_PER_OWNER if role_of(credential) is Role.OWNER else REVOKED_PER_NODE)

    def _make_room(self, new: Revocation) -> bool:
        """Within its branch and in all; where that is full, those of signers further down make way."""
        gone: set[_Key] = set()
        bounds = [(new.branch, REVOKED_PER_BRANCH)] if new.branch else []
        for branch, limit in (*bounds, (None, REVOKED_IN_ALL)):
            known = {
                key: each
                for key, each in self._all.items()
                if key not in gone and branch in (None, each.branch)
            }
            if len(known) >= limit:
                last = max(known, key=lambda key: known[key].rank)
                if len(known[last].credential) <= len(new.credential):
                    return False
                gone.add(last)
        self._all = {key: each for key, each in self._all.items() if key not in gone}
        return True

    def strikes(self, credential: Credential) -> Revocation | None:
        """The one by which its holder is no member any more."""
        issuers = issuers_of(credential, self._mesh)
        for index, grant in enumerate(credential):
            for revocation in self._in_force.get(grant.invite, ()):
                if revocation.issuer not in (None, issuers[index]):
                    continue
                if revocation.role is Role.OWNER or revocation.signer in issuers[: index + 1]:
                    return revocation
        return None

    def _weigh(self) -> None:
        """Which are in force."""
        self._in_force = {}
        for revocation in sorted(self._all.values(), key=lambda each: each.rank):
            if self.strikes(revocation.credential) is None:
                self._in_force.setdefault(revocation.invite, []).append(revocation)
