"""Invites that were taken back, and whom that concerns.

A revocation counts for a credential that has the invite, if it was signed by whoever made the invite, by
one above that in the credential's chain, or by an owner. Owners may disagree, and may revoke each other:
the one nearer to the creator is heard first, and whom it has revoked is not heard any more. The creator has
no invite, and cannot be revoked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mesh_llm.defaults import REVOKED_PER_BRANCH, REVOKED_PER_NODE, REVOKED_PER_OWNER
from mesh_llm.errors import Forged
from mesh_llm.transport.claims import Claim, signer_of
from mesh_llm.transport.credential import Credential, is_invite_id, issuers_of, role_of
from mesh_llm.types import MeshId, NodeId, Role, Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    invite: str
    signer: NodeId
    role: Role
    credential: Credential
    """The signer's."""
    signed: Signed


def revocation_text(invite: str) -> str:
    return json.dumps({"revoke": invite})


def read_revocation(signed: Signed, mesh: MeshId) -> Revocation:
    """`Forged` where it is none, or its signature does not hold."""
    try:
        document = json.loads(signed.text)
    except (ValueError, RecursionError):
        document = None
    invite = document.get("revoke") if isinstance(document, dict) else None
    if not is_invite_id(invite):
        raise Forged("a revocation that names no invite")
    signer = signer_of(signed, mesh, Claim.REVOCATION)
    if signer.role is Role.CLIENT:
        raise Forged("a revocation by a client")
    return Revocation(
        invite=str(invite),
        signer=signer.node,
        role=signer.role,
        credential=signer.credential,
        signed=signed,
    )


class Revocations:
    def __init__(self, mesh: MeshId) -> None:
        self._mesh = mesh
        self._all: dict[tuple[str, str], Revocation] = {}
        """By the right that the signer had, and by invite: one who became an owner may say it again."""
        self._signed: set[Signed] = set()
        self._by_signer: Counter[NodeId] = Counter()
        self._by_branch: Counter[NodeId | None] = Counter()
        """Those of nodes that are no owners."""
        self._in_force: dict[str, list[Revocation]] = {}
        """By invite."""

    def __len__(self) -> int:
        return len(self._all)

    @property
    def signed(self) -> list[Signed]:
        return [revocation.signed for revocation in self._all.values()]

    def add(self, all_signed: Iterable[Signed]) -> list[Revocation]:
        """Verify what is not known yet; returns the news. `Forged` where one does not hold.

        What is beyond its signer's bound is left out.
        """
        news = []
        try:
            for signed in all_signed:
                if signed in self._signed:
                    continue
                revocation = read_revocation(signed, self._mesh)
                key = signed.credential, revocation.invite
                if key not in self._all and self.has_room(revocation.signer, revocation.credential):
                    self._keep(key, revocation)
                    news.append(revocation)
        finally:
            if news:
                self._weigh()
        return news

    def has_room(self, signer: NodeId, credential: Credential) -> bool:
        """For one more of that signer's."""
        if role_of(credential) is Role.OWNER:
            return self._by_signer[signer] < REVOKED_PER_OWNER
        # A node lets in as many others as it likes: all below one of the creator's own invites share a bound.
        branch = self._by_branch[_branch(credential)]
        return self._by_signer[signer] < REVOKED_PER_NODE and branch < REVOKED_PER_BRANCH

    def strikes(self, credential: Credential) -> Revocation | None:
        """The one by which its holder is no member any more."""
        issuers = issuers_of(credential, self._mesh)
        for index, grant in enumerate(credential):
            for revocation in self._in_force.get(grant.invite, ()):
                if revocation.role is Role.OWNER or revocation.signer in issuers[: index + 1]:
                    return revocation
        return None

    def _keep(self, key: tuple[str, str], revocation: Revocation) -> None:
        self._all[key] = revocation
        self._signed.add(revocation.signed)
        self._by_signer[revocation.signer] += 1
        if revocation.role is not Role.OWNER:
            self._by_branch[_branch(revocation.credential)] += 1

    def _weigh(self) -> None:
        """Which are in force: whoever is nearer to the creator is heard first."""
        self._in_force = {}
        for revocation in sorted(self._all.values(), key=lambda each: (len(each.credential), each.signer)):
            if self.strikes(revocation.credential) is None:
                self._in_force.setdefault(revocation.invite, []).append(revocation)


def _branch(credential: Credential) -> NodeId | None:
    """Whom the creator itself let in, and the holder came by; None for the creator."""
    return credential[0].node if credential else None
