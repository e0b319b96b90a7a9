"""Offers to pair, as the local network is told of them by multicast DNS.

What is found was said by anybody on that network: names are made fit for a terminal, and count for nothing
until the code has been proven. IPv4 alone: an IPv6 address of one link means nothing without its interface,
which an invite cannot name, and networks of people without IPv4 are rare. Those have the token.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.sanitise import clean
from mesh_llm.transport.identity import is_node_id
from mesh_llm.transport.invite import join_address, split_address
from mesh_llm.types import Address, NodeId

SERVICE = "_mesh-llm-pair._udp.local."
LABEL_CHARS = 40
"""Of the name under which a mesh is announced; 63 bytes are what DNS takes."""
FOUND_LIMIT = 32
_ADDRESSES_LIMIT = 8
_RESOLVE_S = 3.0
_POLL_S = 0.2


@frozen
class FoundMesh:
    """An offer on the local network."""

    label: str
    node: NodeId
    address: Address


def fit_label(text: str) -> str:
    """As it can be announced: one DNS label."""
    label = clean(text.strip(), LABEL_CHARS).replace(".", " ")
    while len(label.encode()) > 63:
        label = label[:-1]
    return label.strip() or "mesh"


@asynccontextmanager
async def announced(label: str, node: NodeId, direct: Iterable[str], *, ip: str | None) -> AsyncIterator[str]:
    """Tell the local network as long as the block runs. Yields the label, with a number if it was taken."""
    from zeroconf import Error, ServiceInfo

    places = [split_address(text) for text in direct]
    ipv4 = [(address, port) for address, port in places if address.version == 4][:_ADDRESSES_LIMIT]
    if not ipv4:
        raise MeshError("this machine has no IPv4 address to be found at", hint="use an invite token instead")
    service = ServiceInfo(
        SERVICE,
        f"{fit_label(label)}.{SERVICE}",
        parsed_addresses=[str(address) for address, _ in ipv4],
        port=ipv4[0][1],
        server=f"mesh-{node[:16]}.local.",
        properties={"id": node},
    )
    async with _zeroconf(ip) as network:
        try:
            await network.async_register_service(service, allow_name_change=True)
        except (Error, OSError) as error:
            raise MeshError(f"the local network cannot be told: {_said(error)}") from error
        try:
            yield service.name.removesuffix(f".{SERVICE}")
        finally:
            await network.async_unregister_service(service)


async def find(*, within_s: float, ip: str | None, label: str | None = None) -> list[FoundMesh]:
    """Offers that answer in time; with `label` it ends as soon as one of that name was found."""
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser

    names: list[str] = []
    found: dict[str, FoundMesh] = {}

    def on_change(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is ServiceStateChange.Removed:
            found.pop(name, None)
            if name in names:
                names.remove(name)
        elif name not in names and len(names) < FOUND_LIMIT:
            names.append(name)

    async def resolve(network: Any, name: str) -> None:
        if (offer := await _resolved(network.zeroconf, name)) is not None and name in names:
            found[name] = offer

    async with _zeroconf(ip) as network:
        browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[on_change])
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while not any(offer.label == label for offer in found.values()):
                        await asyncio.sleep(_POLL_S)
                        await asyncio.gather(*(resolve(network, name) for name in names if name not in found))
        finally:
            await browser.async_cancel()
    return sorted(found.values(), key=lambda offer: (offer.label, offer.node))


async def _resolved(zeroconf: Any, name: str) -> FoundMesh | None:
    from zeroconf.asyncio import AsyncServiceInfo

    service = AsyncServiceInfo(SERVICE, name)
    if not await service.async_request(zeroconf, _RESOLVE_S * 1000):
        return None
    return read(name, service.properties, service.parsed_addresses(), service.port)


def read(
    name: str, properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> FoundMesh | None:
    """What an announcement says, or None if it is not one of ours."""
    id = (properties.get(b"id") or b"").decode("ascii", "replace")
    if not is_node_id(id) or not port:
        return None
    places = []
    for text in addresses[:_ADDRESSES_LIMIT]:
        ip = ipaddress.ip_address(text.partition("%")[0])
        # A neighbour: whoever announces must not have this machine call somebody far away.
        if ip.is_private and not ip.is_unspecified:
            places.append(join_address(ip, port))
    if not places:
        return None
    label = clean(name.removesuffix(f".{SERVICE}"), LABEL_CHARS)
    return FoundMesh(label=label, node=NodeId(id), address=Address(direct=tuple(places)))


@asynccontextmanager
async def _zeroconf(ip: str | None) -> AsyncIterator[Any]:
    from zeroconf import InterfaceChoice, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    try:
        network = AsyncZeroconf(
            interfaces=InterfaceChoice.All if ip is None else [ip], ip_version=IPVersion.V4Only
        )
    except OSError as error:
        raise MeshError(
            f"the local network cannot be searched: {_said(error)}", hint="use an invite token instead"
        ) from error
    try:
        yield network
    finally:
        await network.async_close()


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
