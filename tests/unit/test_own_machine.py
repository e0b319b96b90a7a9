"""Which members are on this node's machine, whatever they say of that."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mesh_llm.node.node import Node
from mesh_llm.types import LinkKind, NodeId, Role
from tests.support.composed import ANN, BEN, a_node, admit, open_doors

PUPPETS = [NodeId(f"{number:064x}") for number in range(20)]


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """ANN is here."""
    node = a_node(tmp_path)
    node.mesh.publish(machine="m1")
    admit(node, ANN, machine="m1")
    open_doors(monkeypatch, tmp_path, ANN)
    return node


def heard_from(node: Node, monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """Connections come from these addresses, or over a relay."""

    def peer(other: NodeId) -> Any:
        place = places.get(other[0])
        if place is None:
            return None
        kind = LinkKind.RELAY if place == "relay" else LinkKind.QUIC
        return SimpleNamespace(path=lambda: SimpleNamespace(kind=kind, remote=place))

    monkeypatch.setattr(node.mesh, "peer", peer)


def address(family: int, text: str, netmask: str | None) -> Any:
    return SimpleNamespace(family=family, address=text, netmask=netmask)


async def test_nodes_that_only_say_they_are_here_take_no_threads(node: Node) -> None:
    for puppet in PUPPETS:
        admit(node, puppet, machine="m1")
    admit(node, BEN, machine="m1", role=Role.CLIENT)

    assert node.mesh.own_machine.nodes() == 2
    assert node.mesh.paths.of_links(ANN) is LinkKind.LOCAL
    assert node.mesh.paths.of_links(PUPPETS[0]) is not LinkKind.LOCAL


@pytest.mark.parametrize(
    ("place", "nodes"),
    [
        ("127.0.0.1:5", 3),
        ("[::1]:5", 3),
        ("172.17.0.3:5", 3),
        ("[fd00:1::3]:5", 3),
        ("9.9.9.2:5", 3),
        ("9.9.9.3:5", 2),
        ("172.18.0.3:5", 2),
        ("[fd00:2::3]:5", 2),
        ("relay", 2),
    ],
)
async def test_another_users_or_containers_node_is_known_by_where_it_is_heard_from(
    node: Node, monkeypatch: pytest.MonkeyPatch, place: str, nodes: int
) -> None:
    """Its door is where this user does not look."""
    addresses = [
        address(socket.AF_INET, "172.17.0.2", "255.255.0.0"),
        address(socket.AF_INET, "9.9.9.2", "255.255.255.0"),
        address(socket.AF_INET6, "fd00:1::2%eth0", "ffff:ffff:ffff:ffff::"),
        address(-1, "02:42:ac:11:00:02", None),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": addresses})
    admit(node, BEN, machine="m1")
    heard_from(node, monkeypatch, b=place)

    assert node.mesh.own_machine.nodes() == nodes
    assert node.mesh.paths.of_links(BEN) is not LinkKind.LOCAL


async def test_a_door_counts_for_those_alone_that_name_this_machine(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In another network of the same machine files are seen, and sockets are not."""
    admit(node, BEN, machine="m2")
    open_doors(monkeypatch, tmp_path, BEN)

    assert node.mesh.own_machine.nodes() == 2
    assert not node.mesh.own_machine.has(BEN)
