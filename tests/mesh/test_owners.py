"""Owners: whoever set up the mesh, and whoever it made one, so that the mesh outlives a machine."""

from __future__ import annotations

import pytest

from tests.support.command import mesh_llm
from tests.support.joining import JoiningNode, Lab, refused, said


def until_context(node: JoiningNode, context: int) -> None:
    node.until_status(
        lambda status: (
            status["node"]["state"] == "serving" and (status["model"] or {}).get("context") == context
        ),
        what=f"it serves with a context of {context}",
    )


def promoted(one: JoiningNode, two: JoiningNode) -> None:
    one.until_nodes("one", "two")
    answer = said(mesh_llm("promote", "two", "--home", one.home, "--json"))
    assert (answer["name"], answer["id"]) == ("two", two.status()["node"]["id"])


@pytest.mark.full
def test_an_owner_sets_the_plan_after_the_creator_is_gone(nodes: Lab) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    promoted(one, two)
    one.until_status(
        lambda status: all(node["owner"] for node in status["mesh"]["nodes"]), what="both are owners"
    )
    one.stop()
    two.stop()

    two = nodes.start("two", "--ctx-size", "256").until_ready()
    until_context(two, 256)
    # Back again without a word about it, the creator goes by what the other one has set.
    one = nodes.start("one").until_ready()
    one.until_nodes("one", "two")
    until_context(one, 256)
    two.stop()
    until_context(one, 256)
    # And what it is asked to change it changes, and nothing else.
    one.stop()
    one = nodes.start("one", "--alias", "ours").until_ready()
    until_context(one, 256)
    assert one.status()["model"]["name"] == "ours"


def test_an_owner_by_its_token_invites_and_revokes(nodes: Lab) -> None:
    one = nodes.create("one")
    two = nodes.start("two", "--join", one.token(role="owner")).until_ready()
    three = nodes.join("three", one)
    for node in (one, two):
        node.until_nodes("one", "three", "two")

    ended = mesh_llm("invite", "--role", "owner", "--home", three.home)
    assert refused(ended) == "only an owner of the mesh can make another owner"
    assert refused(mesh_llm("promote", "three", "--home", three.home))
    ended = mesh_llm("invite", "revoke", "two", "--home", three.home)
    assert refused(ended) == "this node may not revoke 'two': no invite of its own, or of nodes it let in"

    answer = said(mesh_llm("invite", "revoke", "three", "--home", two.home, "--json"))
    assert answer["expelled"] == ["three"]
    assert refused(three.wait()) == "this node was expelled from its mesh: its invite was revoked"
    one.until_nodes("one", "two")


@pytest.mark.full
def test_a_token_for_one_machine(nodes: Lab) -> None:
    one = nodes.create("one")
    token = said(mesh_llm("invite", "--uses", "1", "--home", one.home, "--json"))["token"]
    two = nodes.start("two", "--join", token).until_ready()
    assert refused(nodes.start("three", "--join", token).wait()) == "the token has been used up"
    # As a service does that has it in its command line.
    two.stop()
    two = nodes.start("two", "--join", token).until_ready()
    two.until_nodes("one", "two")
