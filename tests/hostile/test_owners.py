"""Who makes whom an owner: an owner a member, and nobody himself."""

from __future__ import annotations

import secrets

from mesh_llm.transport import credential as credentials
from mesh_llm.transport.credential import Grant, extend, role_of
from mesh_llm.types import NodeId, Role
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import QUICK_S, address_of, id_of, membership, restarted, serves
from tests.support.command import mesh_llm
from tests.support.joining import Lab, refused, said


def presumed(bad: Adversary, node: NodeId) -> str:
    """A grant of ownership by a node that has none, signed as well as it can."""
    own, invite = bad.membership.credential, secrets.token_hex(8)
    message = credentials._signed(bad.mesh, own, node, Role.OWNER, invite, bad.id)
    grant = Grant(node=node, role=Role.OWNER, invite=invite, signature=bad.identity.sign(message))
    return credentials.to_text((*own, grant))


def as_creator(bad: Adversary, node: NodeId) -> str:
    """A grant as the creator would give it, with another one's signature."""
    return credentials.to_text(
        extend((), bad.mesh, bad.identity, node, Role.OWNER, secrets.token_hex(8)),
    )


def test_nobody_is_made_an_owner_by_one_who_is_none(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    two_id = id_of(two)
    before = membership(two.home).credential
    sentence = refused(mesh_llm("promote", "one", "--home", two.home))
    assert sentence == "only an owner of the mesh can make another owner"
    bad, owner = villain(one.token()), villain(one.token(role="owner"), name="owner")
    bad.connect(two_id, address_of(two))

    forged = [presumed(bad, two_id), as_creator(bad, two_id), owner.credential, bad.credential, "", "AAAA"]
    for credential in forged:
        assert bad.said(bad.promotion(credential), to=two_id), bad.refusal(two_id)

    # Which writes its home.
    two.invite()
    assert membership(two.home).credential == before
    assert role_of(before) is Role.NODE
    assert serves(two) == serves(one)
    # An owner's own hand: that it can be done at all.
    assert said(mesh_llm("promote", "two", "--home", one.home, "--json"))["name"] == "two"
    two.until(
        lambda: role_of(membership(two.home).credential) is Role.OWNER, what="it owns", within_s=QUICK_S
    )
    assert serves(restarted(nodes, two)) == serves(one)
