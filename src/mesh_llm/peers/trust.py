"""What this node signs, and what it believes of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mesh_llm.errors import Forged, MalformedMessage, Misquoted
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import counts_up_to
from mesh_llm.membership.record import Record, Told, read_record
from mesh_llm.transport.claims import Claim, holder_of_right, signer_of
from mesh_llm.transport.credential import Credential, origin_of
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.network import Membership, Network, Stream
from mesh_llm.types import NodeId, Role, ServingPlan, Signed

log = logging.getLogger(__name__)

_USELESS_LIMIT = 256
"""Of at most some 50 KB each; those that come again and again are few."""


@frozen
class Origin:
    """Who opened a stream, proven by its connection or by its signature."""

    id: NodeId
    role: Role
    account: str
    """Whose share of the engine it uses: all who came in by one client's invite have one together."""

    @classmethod
    def of(cls, node: NodeId, role: Role, credential: Credential) -> Origin:
        account = f"client:{origin_of(credential)}" if role is Role.CLIENT else node
        return cls(id=node, role=role, account=account)


Service = Callable[[Origin, dict[str, Any], Stream], Awaitable[None]]
"""Serves one stream that another member opened; its task ends with the stream."""


class Trust:
    """For records; `transport.claims` has the table of who may claim what."""

    def __init__(self) -> None:
        self._useless: dict[Signed, None] = {}
        """Signed by their nodes, and yet not to be taken: not worth another verification."""
        self.network: Network | None = None
        """None until the node has one: before, it says and hears nothing."""

    @property
    def membership(self) -> Membership:
        assert self.network is not None
        return self.network.mesh

    @property
    def identity(self) -> Identity:
        assert self.network is not None
        return self.network.config.identity

    def seal(self, text: str) -> Signed:
        """Sign what this node says about itself."""
        return self.membership.seal(self.identity, Claim.RECORD, text)

    def verified(self, told: Told) -> Record | None:
        """What a node says about itself, if it has signed it and is a member; raises `Forged`."""
        membership = self.membership
        assert membership.mesh is not None and told.signed is not None
        if told.signed in self._useless:
            return None
        holder = holder_of_right(told.signed.credential, membership.mesh)
        if membership.revocations.strikes(holder.credential) is not None:
            # For now: a revocation counts no more once the owner who signed it is out.
            return None
        signer = signer_of(told.signed, membership.mesh, Claim.RECORD)
        if signer.node != told.node or signer.role is Role.CLIENT:
            raise Forged("a record that its own node did not sign")
        try:
            record = read_record(told)
        except Misquoted as error:
            # By whoever passed it on: others may bring the same as it was signed.
            log.info("record left out node=%s: %s", told.node[:8], error.message)
            return None
        except MalformedMessage as error:
            # Signed by its node: a newer version's, perhaps.
            log.info("record left out node=%s: %s", told.node[:8], error.message)
            self._refuse(told.signed)
            return None
        facts, own = record.facts, partial(_is_own, record.node)
        serving = facts.serving if facts.serving is not None and own(facts.serving) else None
        facts = replace(
            facts,
            role=signer.role,
            serving=serving,
            also_serving=tuple(filter(own, facts.also_serving)),
            replicas=tuple(plan for plan in facts.replicas if plan.replica and own(plan)),
            starting=tuple(filter(own, facts.starting)),
        )
        return replace(record, facts=facts)

    def _refuse(self, signed: Signed) -> None:
        self._useless[signed] = None
        if len(self._useless) > _USELESS_LIMIT:
            del self._useless[next(iter(self._useless))]


def _is_own(node: NodeId, serving: ServingPlan) -> bool:
    """Whether a plan that a node publishes is its own, and of an epoch that a mesh can have come to."""
    return serving.plan.host == node and serving.epoch <= counts_up_to(time.time())
