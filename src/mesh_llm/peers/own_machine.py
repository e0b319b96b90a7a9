"""Who else is on this node's machine: what a member says of that, any other one can say as well."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from itertools import chain

import psutil

from mesh_llm.errors import PeerLost
from mesh_llm.home import link_door
from mesh_llm.peers.members import Members
from mesh_llm.types import LinkKind, NodeId, Role


class OwnMachine:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._doors: set[NodeId] = set()
        """Whose have been seen here."""

    def nodes(self) -> int:
        """Nodes that compute here, this one included."""
        return 1 + sum(map(self.has, self._claimants()))

    def has(self, node: NodeId) -> bool:
        """Whether it is here as it says; it may be another user's, or in a container."""
        return self.has_door(node) or (self._is_named_by(node) and self._is_heard_from_near(node))

    def has_door(self, node: NodeId) -> bool:
        """Whether it takes local links: its door lies where only nodes of this user can make one."""
        if not self._is_named_by(node):
            return False
        if node not in self._doors and link_door(node).exists():
            self._doors.add(node)
        return node in self._doors

    def _claimants(self) -> list[NodeId]:
        """Other nodes that say that they are here."""
        others = (m for m in self._members.alive() if m.id != self._members.me)
        return [m.id for m in others if m.facts.role is not Role.CLIENT and self._is_named_by(m.id)]

    def _is_named_by(self, node: NodeId) -> bool:
        own, member = self._members.facts.machine, self._members.member(node)
        return member is not None and bool(own) and member.facts.machine == own

    def _is_heard_from_near(self, node: NodeId) -> bool:
        peer = self._members.peer(node)
        try:
            path = peer.path() if peer is not None else None
        except PeerLost:
            return False
        return path is not None and path.kind is LinkKind.QUIC and _is_near(path.remote)


def _is_near(place: str) -> bool:
    """Whether an `IP:PORT` is this machine's, or of a private network of it, as its containers are."""
    ip = ipaddress.ip_address(place.rpartition(":")[0].strip("[]").partition("%")[0])
    near = (each.ip == ip or (each.is_private and ip in each.network) for each in _own_addresses())
    return ip.is_loopback or any(near)


def _own_addresses() -> Iterator[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    for each in chain.from_iterable(psutil.net_if_addrs().values()):
        if each.family in (socket.AF_INET, socket.AF_INET6) and each.netmask is not None:
            bits = int(ipaddress.ip_address(each.netmask)).bit_count()
            yield ipaddress.ip_interface(f"{each.address.partition('%')[0]}/{bits}")
