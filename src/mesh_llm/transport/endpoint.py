"""iroh's endpoint, bound as a person asked for it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from enum import IntEnum
from typing import Any

import psutil

from mesh_llm.defaults import ALPN
from mesh_llm.errors import MeshError, PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import IpAddress, is_relay_url, join_address, split_address
from mesh_llm.transport.iroh_library import iroh, message_of, use_running_loop
from mesh_llm.types import Address, NodeId

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
        parsed[join_address(ip, port)] = (reach_of(ip, interfaces.get(str(ip))), ip.version)
    return tuple(sorted(parsed, key=lambda text: (*parsed[text], text)))


class Reach(IntEnum):
    """Who gets through to an address; the most useful ones come first."""

    DIRECT = 0
    TUNNEL = 2
    OUTSIDE = 3
    """Seen from outside: a NAT's. Of use to those beyond it, after all that is nearer."""
    INNER = 5
    """Containers and virtual machines on this machine."""
    LOOPBACK = 6
    NOBODY = 7


def reach_of(ip: IpAddress, interface: str | None) -> Reach:
    """`interface` is None where this machine has no such address itself."""
    if ip.is_loopback:
        return Reach.LOOPBACK
    if ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return Reach.NOBODY
    if interface is None:
        return Reach.OUTSIDE
    if interface.startswith(_INNER):
        return Reach.INNER
    return Reach.TUNNEL if interface.startswith(_TUNNEL) else Reach.DIRECT


@frozen
class NetworkConfig:
    identity: Identity
    bind_ip: str | None = None
    """None: every interface."""
    bind_port: int = 0
    last_ports: tuple[int, int] = (0, 0)
    """Those of the run before, for IPv4 and IPv6: where others look for this node. Any free ones where they
    are taken, and of no importance beside a `bind_port`."""
    relay: str | None = None
    """A relay's URL, instead of the public ones."""
    relay_token: str | None = field(default=None, repr=False)
    no_relay: bool = False
    """Direct paths only, and no public lookups."""
    alpn: bytes = ALPN
    """The protocol that is spoken there."""


async def bind(config: NetworkConfig) -> Any:
    """Never waits for a relay: without the internet it is as fast."""
    use_running_loop()
    if config.bind_port == 0 and any(config.last_ports):
        with suppress(iroh().IrohError):
            return await _bind(config, *_sockets(config))
        config = replace(config, last_ports=(0, 0))
    first, second = _sockets(config)
    try:
        try:
            return await _bind(config, first, second)
        except iroh().IrohError:
            # The second family may not exist on this machine; the first is what counts.
            return await _bind(config, first)
    except iroh().IrohError as error:
        raise MeshError(
            f"cannot bind QUIC to {first}: {message_of(error)}",
            hint="choose another --bind-port or --bind-ip; 0 takes any free port",
        ) from None


def _sockets(config: NetworkConfig) -> tuple[str, str]:
    """iroh opens a socket per IP version. Where one address was asked for, the other version's stays
    on loopback: nothing that was not asked for is open to the network."""
    ports = (config.bind_port, config.bind_port) if config.bind_port else config.last_ports
    if config.bind_ip is None:
        return f"0.0.0.0:{ports[0]}", f"[::]:{ports[1]}"
    try:
        ip = ipaddress.ip_address(config.bind_ip)
    except ValueError:
        raise MeshError(f"{config.bind_ip!r} is not an IP address", hint="for --bind-ip") from None
    if ip.version == 4:
        return f"{ip}:{ports[0]}", "[::1]:0"
    return f"[{ip}]:{ports[1]}", "127.0.0.1:0"


async def _bind(config: NetworkConfig, *sockets: str) -> Any:
    ffi = iroh()
    public = config.relay is None and not config.no_relay

    base: Any = ffi.Preset

    class Preset(base):  # type: ignore[misc]
        def apply(self, builder: Any) -> None:
            (builder.apply_n0 if public else builder.apply_minimal)()
            for socket in sockets:
                builder.bind_addr(socket)

    options = ffi.EndpointOptions(preset=Preset(), secret_key=config.identity.secret, alpns=[config.alpn])
    if not public:
        options.relay_mode = _relay_mode(config)
    return await ffi.Endpoint.bind(options)


def _relay_mode(config: NetworkConfig) -> Any:
    ffi = iroh()
    if config.no_relay or config.relay is None:
        return ffi.RelayMode.disabled()
    relays = ffi.RelayMap.empty()
    try:
        relays.insert(ffi.RelayConfig(url=config.relay, auth_token=config.relay_token))
    except ffi.IrohError as error:
        raise MeshError(f"{config.relay!r} is not a relay's URL: {message_of(error)}") from None
    return ffi.RelayMode.custom(relays)


def addresses_seen(endpoint: Any) -> object:
    """Something that changes whenever the endpoint's addresses do; cheaper than to put them in order."""
    own = endpoint.addr()
    return set(own.direct_addresses()), own.relay_url()


def address_of(endpoint: Any, config: NetworkConfig) -> Address:
    """Where others should try to reach it."""
    own = endpoint.addr()
    direct = ordered(own.direct_addresses(), interfaces())
    if config.bind_ip is not None:
        ip = ipaddress.ip_address(config.bind_ip)
        if not ip.is_unspecified:
            direct = tuple(address for address in direct if split_address(address)[0] == ip)
            direct = direct or _bound(endpoint, config.bind_ip)
    relay = own.relay_url()
    # Known from the start where it was named, though the endpoint may not have reached it yet.
    return Address(direct=direct, relay=relay or (None if config.no_relay else config.relay))


def ports_of(endpoint: Any) -> tuple[int, int]:
    """Bound for IPv4 and for IPv6; 0 where there is none."""
    bound = [split_address(text) for text in endpoint.bound_sockets()]
    by_version = {ip.version: port for ip, port in bound}
    return by_version.get(4, 0), by_version.get(6, 0)


def _bound(endpoint: Any, ip: str) -> tuple[str, ...]:
    parts = (split_address(text) for text in endpoint.bound_sockets())
    return tuple(join_address(bound, port) for bound, port in parts if str(bound) == ip)


def remote_address(node: NodeId, address: Address) -> Any:
    """For iroh to dial. What is malformed in an address that others told us does not spoil the rest."""
    ffi = iroh()
    try:
        key = ffi.EndpointId.from_bytes(bytes.fromhex(node))
    except (ffi.IrohError, ValueError):
        raise PeerLost(f"node {node[:10]} has an id that is not a valid key") from None
    relay = address.relay if address.relay and is_relay_url(address.relay) else None
    return ffi.EndpointAddr(key, relay, list(ordered(address.direct, {})))
