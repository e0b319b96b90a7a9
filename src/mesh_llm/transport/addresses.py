"""Of a node's own addresses, those that others should try, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil

from mesh_llm.transport.invite import IpAddress, join_address, split_address

_INNER = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "cni", "flannel", "podman", "lxc", "cali")
"""Bridges to containers and virtual machines on this machine: no other machine gets through."""
_TUNNEL = ("tun", "tap", "wg", "tailscale", "utun", "zt", "ppp")


def interfaces() -> dict[str, str]:
    """The interface of each IP address of this machine."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            found[address.address.partition("%")[0]] = name
    return found


def ordered(addresses: Iterable[str], interfaces: Mapping[str, str]) -> tuple[str, ...]:
    """Canonical, without repetition, malformed ones left out."""
    parsed = {}
    for text in addresses:
        try:
            ip, port = split_address(text)
        except ValueError:
            continue
        parsed[join_address(ip, port)] = (_rank(ip, interfaces.get(str(ip))), ip.version)
    return tuple(sorted(parsed, key=lambda text: (*parsed[text], text)))


def _rank(ip: IpAddress, interface: str | None) -> int:
    if ip.is_loopback:
        return 6
    if ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return 7
    if interface is None:
        # Seen from outside: a NAT's. Of use to those beyond it, after all that is nearer.
        return 3
    if interface.startswith(_INNER):
        return 5
    if interface.startswith(_TUNNEL):
        return 2
    return 0
