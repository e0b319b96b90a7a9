"""Whose share of an engine a node's requests take, and what is believed of what members say."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.membership.checked_fields import WHOLE_LIMIT, counts_up_to
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record, Told, record_text, told
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.trust import Origin, Trust
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.credential import Credential, Grant
from mesh_llm.transport.network import Network
from mesh_llm.types import NodeFacts, NodeId, Role, ServingPlan
from tests.support.claims import creator
from tests.support.planning import plan_of

CREATOR = creator(1)
ANNE, BERT = CREATOR.invites(2), CREATOR.invites(3)
PLANS = [each.name for each in fields(NodeFacts) if "ServingPlan" in str(each.type)]
"""What a node tells of plans."""
NODE, CLIENT, TWIN, OTHER = (NodeId(letter * 64) for letter in "bcde")


INVITER, TWO = (NodeId(letter * 64) for letter in "fg")


def credential(node: NodeId, role: Role, *invites: str, by: NodeId = INVITER) -> Credential:
    holders = ([by] * len(invites) + [node])[-len(invites) :] if invites else []
    return tuple(
        Grant(node=holder, role=role, invite=invite, signature=b"")
        for holder, invite in zip(holders, invites, strict=True)
    )


def account(node: NodeId, role: Role, *invites: str) -> str:
    return Origin.of(node, role, credential(node, role, *invites)).account


def test_all_who_came_in_by_one_clients_token_are_one() -> None:
    first, second = (account(node, Role.CLIENT, "first", "third") for node in (CLIENT, TWIN))
    assert first == second
    assert account(OTHER, Role.CLIENT, "first", "fourth") != first
    # An id that another node has chosen for an invite of its own is another invite.
    forged = Origin.of(OTHER, Role.CLIENT, credential(OTHER, Role.CLIENT, "first", "third", by=TWO))
    assert forged.account != first


def test_nodes_are_themselves() -> None:
    assert account(NODE, Role.NODE, "first", "second") == NODE
    assert account(NODE, Role.OWNER) == NODE


# -- records -------------------------------------------------------------------------------------


@pytest.fixture
def trust() -> Trust:
    """The creator's."""
    trust = Trust()
    trust.network = cast(Network, SimpleNamespace(mesh=CREATOR.membership()))
    return trust


def annes(**facts: Any) -> Told:
    """ANNE's record."""
    record = Record(
        node=ANNE.id,
        incarnation=1,
        sequence=1,
        standing=Standing.ALIVE,
        facts=NodeFacts(name="anne", role=Role.NODE, version="1", **facts),
    )
    return told(replace(record, signed=ANNE.says(Claim.RECORD, record_text(record))))


def plan(epoch: int, host: NodeId = ANNE.id, replica: int = 0) -> ServingPlan:
    return ServingPlan(epoch=epoch, plan=plan_of((host, 0, 4)), replica=replica)


@pytest.mark.parametrize("name", PLANS)
def test_only_a_nodes_own_plans_count_and_only_under_epochs_that_a_mesh_can_have(
    trust: Trust, name: str
) -> None:
    is_list = "tuple" in str(NodeFacts.__dataclass_fields__[name].type)
    good = plan(3, replica=1)
    bad = [plan(WHOLE_LIMIT, replica=1), plan(counts_up_to(time.time()) + 60_000, replica=1)]
    bad += [plan(4, BERT.id, replica=1)]
    bad += [plan(4)] if name == "replicas" else []

    for each in bad:
        record = trust.verified(annes(**{name: (each, good) if is_list else each}))
        assert record is not None
        assert getattr(record.facts, name) == ((good,) if is_list else None)
    record = trust.verified(annes(**{name: (good,) if is_list else good}))
    assert record is not None
    assert getattr(record.facts, name) == ((good,) if is_list else good)


def test_a_record_that_was_misquoted_is_taken_from_others(trust: Trust) -> None:
    genuine = annes()

    for changes in ({"incarnation": 5}, {"sequence": 5}, {"standing": Standing.LEFT}):
        assert trust.verified(replace(genuine, **changes)) is None

    record = trust.verified(genuine)
    assert record is not None
    assert record.version == genuine.version


def test_what_is_no_record_is_verified_once(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    useless = replace(annes(), signed=ANNE.says(Claim.RECORD, "{}"))
    assert trust.verified(useless) is None

    monkeypatch.setattr("mesh_llm.peers.trust.signer_of", lambda *_: pytest.fail("verified again"))
    assert trust.verified(useless) is None


def test_one_who_was_expelled_wrongly_is_taken_back(trust: Trust) -> None:
    """By an owner who is out now."""
    olga = CREATOR.invites(4, Role.OWNER)
    trust.membership.take_revocations([olga.revokes(ANNE.invite)])
    assert trust.verified(annes()) is None

    trust.membership.take_revocations([CREATOR.revokes(olga.invite)])
    assert trust.verified(annes()) is not None


def test_an_epoch_that_was_believed_by_a_wrong_clock_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = NodeFacts(name="anne", role=Role.NODE, version="1")
    mesh = Mesh(ANNE.id, facts, incarnation=1, on_change=lambda: None, on_refused=lambda *_: None)
    now = time.time()
    year_s = 365 * 86_400

    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + year_s)
        mesh.know({}, epoch=counts_up_to(now + year_s))
        assert mesh.highest_epoch() == counts_up_to(now + year_s)

    assert mesh.highest_epoch() <= counts_up_to(time.time())
