"""What is known of the ways to other members."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.defaults import HOP_LOCAL_S
from mesh_llm.membership.heartbeat import MEMBER_RTT_LEAST
from mesh_llm.node.node import Node
from mesh_llm.types import LinkFacts, LinkKind
from tests.support.composed import ANN, a_node, admit, open_doors


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """With a peer on its own machine, whose pings take their time."""
    node = a_node(tmp_path)
    node.mesh.publish(machine="m1")
    admit(node, ANN, machine="m1")
    open_doors(monkeypatch, tmp_path, ANN)
    node.mesh._view._state.links[ANN]._samples.extend([0.009] * MEMBER_RTT_LEAST)
    return node


async def test_the_delay_of_a_local_link_is_the_one_that_is_planned_with(node: Node) -> None:
    link = LinkFacts(kind=LinkKind.LOCAL, rtt_s=HOP_LOCAL_S)

    shown = next(peer["link"] for peer in (await node.status())["mesh"]["nodes"] if peer["id"] == ANN)

    assert node.mesh.paths.news() == ((ANN, link),)
    assert (shown["kind"], shown["rtt_ms"]) == ("local", 1000 * HOP_LOCAL_S)


async def test_a_laboratory_makes_local_links_longer(node: Node) -> None:
    node.mesh.paths.farther_s = lambda _: 0.04

    assert node.mesh.paths.link_to(ANN) == LinkFacts(kind=LinkKind.LOCAL, rtt_s=HOP_LOCAL_S + 0.04)
