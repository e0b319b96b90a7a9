"""Settings and revocations on their way: verified, kept, and passed on to the others."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from mesh_llm.defaults import FRAME_LIMIT_BYTES
from mesh_llm.membership.messages import signed_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.peers.claims_exchange import KIND, ClaimsExchange
from mesh_llm.transport import revocations
from mesh_llm.transport.network import Network, Peer
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Fingerprint, NodeId, Role, Signed
from tests.support.claims import Person, creator

CREATOR = creator(1)
ME, ANNE, BERT = (CREATOR.invites(number) for number in (2, 3, 4))
CLIENT = CREATOR.invites(5, Role.CLIENT)
SETTINGS = MeshSettings(version=1, model="tiny", fingerprint=Fingerprint("ab" * 32), alias="tiny")


@dataclass
class FakePeer:
    id: NodeId
    role: Role = Role.NODE
    sent: list[dict[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def send(self, body: dict[str, Any]) -> None:
        self.sent.append(body)

    def close(self, reason: str = "") -> None:
        self.closed.append(reason)

    def heard(self, name: str) -> list[dict[str, Any]]:
        return [claim for body in self.sent for claim in body.get(name, [])]


class Here:
    """A node with two peers."""

    def __init__(self) -> None:
        self.mesh: Membership = ME.membership()
        self.anne, self.bert = FakePeer(ANNE.id), FakePeer(BERT.id)
        self.peers = {ANNE.id: self.anne, BERT.id: self.bert}
        self.news = 0
        self.exchange = ClaimsExchange(cast(Network, self), self._on_news)

    def _on_news(self) -> None:
        self.news += 1

    def receive(self, peer: FakePeer, **claims: list[Signed]) -> None:
        lists = {name: list(map(signed_to_document, signed)) for name, signed in claims.items()}
        self.exchange.receive(cast(Peer, peer), {"kind": KIND, **lists})


@pytest.fixture
def here() -> Here:
    return Here()


def owners_settings(person: Person = CREATOR) -> Signed:
    membership = person.membership()
    membership.set(SETTINGS, person.identity, now=time.time())
    [signed] = membership.claims()[0]
    return signed


def test_news_are_kept_and_passed_on(here: Here) -> None:
    settings, revoked = owners_settings(), CREATOR.revokes("11" * 8)

    here.receive(here.anne, settings=[settings], revocations=[revoked])

    assert here.mesh.settings == SETTINGS
    assert here.mesh.claims() == ([settings], [revoked])
    assert here.bert.heard("settings") == [signed_to_document(settings)]
    assert here.bert.heard("revocations") == [signed_to_document(revoked)]
    assert here.anne.sent == []
    assert here.news == 1


def test_what_is_known_goes_no_further(here: Here) -> None:
    here.receive(here.anne, settings=[owners_settings()], revocations=[CREATOR.revokes("11" * 8)])
    before = list(here.bert.sent)

    here.receive(here.anne, settings=[owners_settings()], revocations=[CREATOR.revokes("11" * 8)])
    here.receive(here.bert, settings=[owners_settings()])

    assert here.bert.sent == before
    assert here.anne.sent == []
    assert here.news == 1


@pytest.mark.parametrize(
    ("name", "kind", "signed"),
    [
        ("settings", "settings", owners_settings()),
        ("revocations", "revocation", CREATOR.revokes("11" * 8)),
    ],
)
def test_whoever_brings_something_forged_has_made_it_up(
    here: Here, name: str, kind: str, signed: Signed
) -> None:
    spoilt = replace(signed, signature="A" * 88)

    here.receive(here.anne, **{name: [spoilt]})

    (closed,) = here.anne.closed
    assert closed.endswith(f"{kind} with an invalid signature")
    assert here.mesh.claims() == ([], [])
    assert (here.bert.sent, here.news) == ([], 0)


def test_what_is_good_beside_something_forged_is_passed_on(here: Here) -> None:
    """Kept and not passed on, it would reach nobody behind this node any more: here it is known by now."""
    settings, revoked = owners_settings(), CREATOR.revokes("11" * 8)

    here.receive(here.anne, settings=[settings], revocations=[revoked, CLIENT.revokes("22" * 8)])

    assert len(here.anne.closed) == 1
    assert here.mesh.claims() == ([settings], [revoked])
    assert here.bert.heard("settings") == [signed_to_document(settings)]
    assert here.bert.heard("revocations") == [signed_to_document(revoked)]
    assert here.news == 1


@pytest.mark.parametrize("bound", ["REVOKED_PER_BRANCH", "REVOKED_IN_ALL"])
def test_news_for_which_others_make_way_are_news(
    here: Here, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """As many are known afterwards as before."""
    monkeypatch.setattr(revocations, bound, 3)
    below = BERT.invites(6)
    here.receive(here.anne, revocations=[below.revokes(f"{number:016x}") for number in range(3)])
    before = len(here.bert.heard("revocations"))
    revoked = BERT.revokes(below.invite)

    here.receive(here.anne, revocations=[revoked])

    assert len(here.mesh.revocations) == 3
    assert here.mesh.revocations.strikes(below.credential) is not None
    assert here.bert.heard("revocations")[before:] == [signed_to_document(revoked)]
    assert here.news == 2


def test_a_client_brings_nothing(here: Here) -> None:
    here.receive(FakePeer(CLIENT.id, Role.CLIENT), settings=[owners_settings()])

    assert here.mesh.settings is None
    assert here.bert.sent == []


@pytest.mark.parametrize("body", [{}, {"settings": 5}, {"revocations": [5]}, {"settings": [{}] * 1000}])
def test_what_is_no_claim_is_left_out(here: Here, body: dict[str, Any]) -> None:
    here.exchange.receive(cast(Peer, here.anne), {"kind": KIND, **body})

    assert here.anne.closed == []
    assert here.news == 0


def test_one_who_connects_is_told_everything_in_pieces_that_fit(here: Here) -> None:
    here.mesh.take_settings(owners_settings(), now=time.time())
    here.mesh.take_revocations(CREATOR.revokes(f"{number:016x}") for number in range(2000))
    peer, other = FakePeer(NodeId("ab" * 32)), Here()

    here.exchange.greet(cast(Peer, peer))

    assert max(len(json.dumps(body)) for body in peer.sent) < FRAME_LIMIT_BYTES
    for body in peer.sent:
        other.exchange.receive(cast(Peer, other.anne), body)
    assert other.mesh.claims() == here.mesh.claims()
    assert other.anne.closed == []


def test_claims_of_its_own_reach_everybody(here: Here) -> None:
    here.mesh.revoke("11" * 8, ME.identity)

    here.exchange.spread()

    for peer in (here.anne, here.bert):
        (text,) = [json.loads(claim["text"]) for claim in peer.heard("revocations")]
        assert text == {"revoke": "11" * 8, "issuer": ME.id}
