"""What this node knows of the members of its mesh: who is here, what they offer, what serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from mesh_llm.membership.checked_fields import counts_up_to
from mesh_llm.membership.member import Member, Published, Standing, serving_among
from mesh_llm.membership.record import Record
from mesh_llm.membership.view import View
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.peers.trust import Trust
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.network import Membership, Network, Peer
from mesh_llm.types import Fingerprint, NodeFacts, NodeId, Plan, State

_UNREADY = {
    State.STARTING: "is starting",
    State.DRAINING: "is leaving",
    State.FAILED: "its engine does not run",
}


class Members:
    def __init__(self, me: NodeId, facts: NodeFacts, view: View, trust: Trust) -> None:
        self.me = me
        self.facts = facts
        """What this node tells about itself."""
        self._view = view
        self._trust = trust
        self._highest_epoch = 0
        self._expelled: set[NodeId] = set()

    @property
    def has_network(self) -> bool:
        """Before, it can neither sign what this node says nor tell anybody."""
        return self._trust.network is not None

    @property
    def members(self) -> tuple[Member, ...]:
        return self._view.members

    def alive(self) -> list[Member]:
        return [member for member in self._view.members if member.present]

    def others_reason(self) -> str:
        """Why nothing serves, by the word of a node that has the model: others quote such a one, too."""
        settings = self.settings()
        if settings is None:
            return ""
        for facts in (member.facts for member in self.alive() if member.id != self.me):
            has_it = any(held.fingerprint == settings.fingerprint for held in facts.models)
            if has_it and facts.reason and facts.state in (State.LOADING, State.WAITING):
                return facts.reason
        return ""

    def member(self, node: NodeId) -> Member | None:
        return self._view.member(node)

    def name_of(self, node: NodeId) -> str:
        member = self._view.member(node)
        return member.facts.name if member is not None and member.facts.name else node[:8]

    def has_company(self) -> bool:
        return len(self.alive()) > 1

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=tuple(
                Candidate(
                    id=member.id,
                    facts=member.facts,
                    alive=member.present,
                    reachable=member.id == self.me or _is_heard(member),
                )
                for member in self._view.members
                if member.standing is not Standing.LEFT
            )
        )

    def unready(self) -> dict[NodeId, str]:
        """Members that take no part yet, or no longer."""
        found = {m.id: _UNREADY[m.facts.state] for m in self.alive() if m.facts.state in _UNREADY}
        if self.facts.state is State.FAILED:
            # It knows best itself when to try again.
            found.pop(self.me, None)
        return found | {m.id: _why_it_rests(m.facts) for m in self.alive() if m.facts.resting}

    def serving(self, fingerprint: Fingerprint | None = None) -> Published | None:
        """The published plan of a model, or else of the default one, and its host: of its first replica."""
        return next(iter(self.replicas(fingerprint).values()), None)

    def replicas(self, fingerprint: Fingerprint | None = None) -> dict[int, Published]:
        """All published plans of a model, by number."""
        return serving_among(self.alive(), self.settings(), fingerprint)

    def all_serving(self) -> list[Published]:
        """The published plans of all models, and their hosts."""
        settings, alive = self.settings(), self.alive()
        models = [None] if settings is None else [model.fingerprint for model in settings.models]
        found = (serving_among(alive, settings, fingerprint) for fingerprint in models)
        return [each for plans in found for each in plans.values()]

    def highest_epoch(self) -> int:
        """Of all plans that were ever published, as far as this node has heard."""
        epochs = [plan.epoch for m in self.members for plan in (*m.facts.served, *m.facts.starting)]
        # Believed while this node's clock was ahead, one that nobody else believes would stay for good.
        self._highest_epoch = min(max([self._highest_epoch, *epochs]), counts_up_to(time.time()))
        return self._highest_epoch

    def started(self, node: NodeId) -> int | None:
        """Another number after each restart: incarnations begin with the time in ms, and count doubts."""
        member = self._view.member(node)
        return member.incarnation // 1000 if member is not None else None

    def settings(self) -> MeshSettings | None:
        """Those in force: an owner has signed them."""
        return self.membership.settings if self._trust.network is not None else None

    @property
    def membership(self) -> Membership:
        return self._trust.membership

    @property
    def identity(self) -> Identity:
        return self._trust.identity

    @property
    def records(self) -> tuple[Record, ...]:
        """Of members that are not gone, as they have signed them."""
        return self._view.records

    @property
    def network(self) -> Network | None:
        """None until the node has one."""
        return self._trust.network

    def peer(self, node: NodeId) -> Peer | None:
        """The connection to it, if there is one."""
        return self._trust.network.peers.get(node) if self._trust.network is not None else None

    @property
    def expelled(self) -> set[NodeId]:
        """Since this node started, and not let in again."""
        return self._expelled - {record.node for record in self._view.all_records}

    def _credentials(self) -> Iterator[tuple[NodeId, Credential]]:
        """By which others are or were members, or clients that are connected here, as they have shown."""
        assert self._trust.network is not None
        for peer in self._trust.network.peers.values():
            yield peer.id, peer.credential
        for record in self._view.all_records:
            if record.node != self.me and record.signed is not None:
                yield record.node, credentials.from_text(record.signed.credential)

    def credentials_of(self, *nodes: NodeId) -> list[Credential]:
        """All that these have shown, or everybody has: one who was promoted has two."""
        return [credential for node, credential in self._credentials() if not nodes or node in nodes]


def _why_it_rests(facts: NodeFacts) -> str:
    return f"is paused: {facts.paused}" if facts.paused else "its user unloaded the model there"


def _is_heard(member: Member) -> bool:
    """Whether a new plan may count on it; one that runs goes on until its members are dead."""
    return member.standing is Standing.ALIVE and (member.connected or bool(member.via))


def loses_node(members: Members, plan: Plan) -> Callable[[], bool]:
    """Tells whether a node of the plan is gone, or was started anew since."""
    started = {node: members.started(node) for node in plan.nodes}

    def is_here(node: NodeId) -> bool:
        member = members.member(node)
        return member is not None and member.present and members.started(node) == started[node]

    return lambda: not all(map(is_here, started))
