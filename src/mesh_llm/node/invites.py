"""Invites that this node makes and takes back, and members that it makes owners."""

from __future__ import annotations

import time
from typing import Any

from mesh_llm.errors import MeshError, NodeUnreachable
from mesh_llm.membership.member import called
from mesh_llm.node.joining import Joining
from mesh_llm.peers.claims_exchange import promotion
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport.credential import Credential, check_may_invite, extend, issuers_of
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, encode
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Address, NodeId, Role


class Invites:
    def __init__(self, joining: Joining, mesh: Mesh, identity: Identity) -> None:
        self._joining = joining
        self._mesh = mesh
        self._identity = identity

    @property
    def _membership(self) -> Membership:
        return self._joining.membership

    def _write(self) -> None:
        try:
            self._joining.write()
        except OSError as error:
            raise MeshError(
                f"{self._joining.file} cannot be written: {error.strerror}",
                hint="free some space on that disk; what is not written is forgotten when the node ends",
            ) from error

    def make(
        self, role: Role, lifetime_s: float | None, limit: int | None = None, *, reuse: bool = False
    ) -> dict[str, Any]:
        """A token for `role`; with `reuse` that of an invite which is open and has most of its time left."""
        self.check(role)
        assert self._joining.network is not None and self._membership.mesh is not None
        now = time.time()
        admissions = self._membership.admissions
        open_ones = [
            invite
            for invite in admissions.invites()
            if invite.role is role
            and invite.limit is None
            and invite.state(now) == "open"
            and (invite.expires is None) == (lifetime_s is None)
            and (invite.expires is None or lifetime_s is None or invite.expires - now > lifetime_s / 2)
        ]
        if reuse and open_ones:
            issued = open_ones[-1]
        else:
            issued = admissions.issue(role=role, now=now, lifetime_s=lifetime_s, limit=limit)
            self._write()
        relay, token = self._joining.relay
        address = self._joining.network.address
        invite = Invite(
            id=issued.id,
            mesh=self._membership.mesh,
            secret=issued.secret,
            inviter=self._identity.id,
            address=Address(direct=address.direct, relay=address.relay or relay),
            own_relay=relay is not None,
            relay_token=token if relay is not None else None,
            role=role,
            expires=issued.expires,
        )
        return {"id": issued.id, "token": encode(invite, self._identity)}

    def check(self, role: Role) -> None:
        """Whether this node may make one now."""
        if self._joining.network is None or self._membership.mesh is None:
            raise MeshError("this node is not in its mesh yet", hint="try again in a moment")
        check_may_invite(self._membership.role(self._identity.id), role)

    def listed(self) -> dict[str, Any]:
        now = time.time()
        return {
            "invites": [
                {
                    "id": invite.id,
                    "role": invite.role.value,
                    "state": invite.state(now),
                    "issued": invite.issued,
                    "expires": invite.expires,
                    "uses": invite.uses,
                    "limit": invite.limit,
                }
                for invite in self._membership.admissions.invites()
            ]
        }

    def revoke(self, what: str) -> dict[str, Any]:
        """Take back an invite, named by its id or by who came in by it; expel those who did."""
        names = {member.id: self._mesh.name_of(member.id) for member in self._mesh.members}
        before, settings = set(self._mesh.expelled), self._joining.settings
        meant = self._meant(what)
        for issuer, invite in meant:
            self._membership.revoke(invite, self._identity, issuer)
        if self._joining.is_owner and self._joining.settings is None and settings is not None:
            # They were those of an owner who is out now, and nobody else has set any.
            self._membership.set(settings, self._identity, now=time.time())
        self._mesh.claim()
        self._write()
        out = self._mesh.expelled - before
        return {"id": meant[0][1], "expelled": sorted(names.get(node, node[:8]) for node in out)}

    def _meant(self, what: str) -> list[tuple[NodeId, str]]:
        """The invites that somebody means, and who made them, if this node may revoke them."""
        found = self._by_id(what) or self._by_name(what)
        if not found:
            raise MeshError(
                f"this node may not revoke {what!r}: no invite of its own, or of nodes it let in",
                hint="`mesh-llm invite list` lists its own; an owner can revoke any invite",
            )
        return found

    def _by_id(self, what: str) -> list[tuple[NodeId, str]]:
        """By `ID`, or `MAKER:ID`: whoever makes an invite chooses its id, and may choose another one's."""
        maker, _, id = what.rpartition(":")
        own = {(self._identity.id, id)} if self._membership.admissions.get(id) is not None else set()
        if own and not maker:
            return list(own)
        chains = self._mesh.credentials_of()
        found = sorted(own | {at for chain in chains for at in self._within(chain) if at[1] == id})
        if maker:
            named = {m.id for m in called(maker, self._mesh.members)}
            makers = {node for node, _ in found if node == maker} or named
            found = [at for at in found if at[0] in makers]
        if len(found) > 1:
            raise MeshError(
                f"{len(found)} nodes have made an invite {id}",
                hint="name its maker, too, as MAKER:ID; or name a member",
            )
        return found

    def _by_name(self, name: str) -> list[tuple[NodeId, str]]:
        """All by which it is in: one who was promoted has two."""
        mesh = self._mesh
        named = [m.id for m in called(name, (m for m in mesh.members if m.id != mesh.me))]
        if len(named) > 1:
            raise MeshError(
                f"{len(named)} members are called {name}",
                hint="name one by its id, which `mesh-llm status --json` has",
            )
        if not named:
            return []
        chains = [chain for chain in mesh.credentials_of(named[0]) if chain]
        last = {self._within(chain)[-1] for chain in chains if self._within(chain)}
        mine = {
            (self._identity.id, invite.id)
            for invite in self._membership.admissions.invites()
            if named[0] in invite.nodes and not invite.revoked and (invite.limit == 1 or not last)
        }
        return sorted(last | mine)

    def _within(self, chain: Credential) -> list[tuple[NodeId, str]]:
        """Of its invites those that this node's word counts against."""
        assert self._membership.mesh is not None
        issuers = issuers_of(chain, self._membership.mesh)
        own = self._identity.id
        first = 0 if self._joining.is_owner else issuers.index(own) if own in issuers else len(chain)
        return [(issuers[at], chain[at].invite) for at in range(first, len(chain))]

    def promote(self, name: str) -> dict[str, Any]:
        """Make a member an owner."""
        if not self._joining.is_owner:
            raise MeshError(
                "only an owner of the mesh can make another owner",
                hint="do it on the machine that started the mesh, or on another owner's",
            )
        others = (m for m in self._mesh.alive() if m.id != self._mesh.me)
        found = called(name, others, nodes_first=True)
        if len(found) != 1:
            raise MeshError(
                f"{len(found) or 'no'} members are called {name!r}", hint="`mesh-llm status` lists them"
            )
        [member] = found
        if member.facts.role is not Role.NODE:
            what = "a client" if member.facts.role is Role.CLIENT else "an owner already"
            raise MeshError(f"{name} is {what}")
        assert self._membership.mesh is not None
        admissions = self._membership.admissions
        invite = admissions.issue(role=Role.OWNER, now=time.time(), lifetime_s=None, limit=1)
        own, mesh = self._membership.credential, self._membership.mesh
        credential = extend(own, mesh, self._identity, member.id, Role.OWNER, invite.id)
        peer = self._mesh.peer(member.id)
        if peer is None:
            raise NodeUnreachable(f"{name} is not connected", hint="try again when it is")
        peer.send(promotion(credential))
        admissions.use(invite.id, member.id)
        self._write()
        return {"id": member.id, "name": member.facts.name, "invite": invite.id}
