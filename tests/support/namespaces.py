"""Networks out of Linux network namespaces: switches, NAT routers, pulled cables, firewalls.

    async with switch(3) as hosts:
        await run(hosts[0].command(["ping", "-c1", hosts[1].address]), timeout_s=5)

    async with two_nats() as net:
        ...  # net.behind[0] and net.behind[1] reach net.public[0], and not each other

Every host, switch and router is a namespace of its own, with loopback up and no
IPv6. Nothing of it touches the namespace of the caller, and there is no route out
of what is built here: not one packet leaves the machine. It takes root, `ip` and `nft`;
`unavailable()` says what is missing. The block removes what it built, however it ends;
what a killed process left behind goes when the next one builds something.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.tasks import uninterrupted

COMMAND_S = 20.0
"""For one batch of `ip`: milliseconds, but the kernel may still be tidying up after other networks."""
HOSTS_LIMIT = 200
"""On one switch: one byte of their addresses counts them."""

_FOLDER = Path("/run/netns")
_NAME = re.compile(r"meshlab-(\d+)-\d+-[a-z]+\d*")
_numbers = itertools.count()

_PUBLIC = "203.0.113"
"""A range that is reserved for examples."""
_ROUTER = "router"
_OUTSIDE, _INSIDE, _CABLE = "wan", "lan", "eth0"
_UDP_TABLE = "meshlab_udp"

_PREPARE = """
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ -e "$file" ] && echo 1 > "$file"; done
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
echo "$1" > /proc/sys/net/ipv4/ip_forward
"""

# Like a router at home: what goes out is rewritten and its answers come back; nothing else comes in.
_NAT = """
table ip meshlab_nat {{
    chain out {{ type nat hook postrouting priority 100; oifname "{outside}" masquerade{ports}; }}
    chain through {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "{inside}" oifname "{outside}" accept
    }}
    chain here {{
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iifname {{ "lo", "{inside}" }} accept
    }}
}}
"""
_NO_UDP = f"""
table inet {_UDP_TABLE} {{
    chain into {{ type filter hook input priority -10; iifname != "lo" meta l4proto udp drop; }}
    chain out {{ type filter hook output priority -10; oifname != "lo" meta l4proto udp drop; }}
    chain through {{ type filter hook forward priority -10; meta l4proto udp drop; }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine in a namespace of its own, with one cable."""

    namespace: str
    address: str
    interface: str
    plug: tuple[str, str]
    """Where its cable ends: the namespace of the switch or router, and the interface there."""
    gateway: str | None = None

    def command(self, argv: Sequence[str | Path]) -> list[str | Path]:
        """`argv` as a command line that runs it on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Internet:
    """Public hosts on one segment, and hosts behind a NAT router each."""

    public: tuple[Host, ...]
    behind: tuple[Host, ...]
    """`behind[i]` reaches all public hosts through `routers[i]`; nobody reaches it unasked."""
    routers: tuple[Host, ...]
    """With their public addresses."""


async def unavailable() -> str | None:
    """Why no network can be built here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nft"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program}"
    try:
        async with switch(1) as (host,):
            await drop_udp(host)
    except MeshError as error:
        return f"no network namespaces here: {error.message}"
    return None


@asynccontextmanager
async def switch(count: int) -> AsyncIterator[tuple[Host, ...]]:
    """`count` hosts on one switch: 10.77.0.1, 10.77.0.2 … and no way out."""
    async with _workshop() as build:
        yield await build.segment("10.77.0", ["h"] * count)


@asynccontextmanager
async def nat(*, public: int = 1, symmetric: bool = False) -> AsyncIterator[Internet]:
    """One host behind a NAT router, and `public` hosts on the other side of it.

    A symmetric NAT takes another port for every destination, as strict ones do.
    """
    async with _workshop() as build:
        yield await build.internet(public=public, behind=1, symmetric=symmetric)


@asynccontextmanager
async def two_nats(*, public: int = 1, symmetric: bool = False) -> AsyncIterator[Internet]:
    """Two hosts behind two different NAT routers, and `public` hosts that both of them reach."""
    async with _workshop() as build:
        yield await build.internet(public=public, behind=2, symmetric=symmetric)


async def drop_udp(host: Host) -> None:
    """A firewall on `host` (or router) that drops UDP both ways; loopback stays."""
    await _nft(host.namespace, _NO_UDP)


async def allow_udp(host: Host) -> None:
    """Take `drop_udp` back."""
    await _nft(host.namespace, f"delete table inet {_UDP_TABLE}")


async def link_down(host: Host) -> None:
    """Pull the host's cable: it keeps its address and its sockets, and reaches nobody."""
    await _set_link(host, "down")


async def link_up(host: Host) -> None:
    await _set_link(host, "up")


async def renumber(host: Host, address: str) -> Host:
    """Give the host another address of its segment, as a new lease would; it keeps its sockets."""
    moved = replace(host, address=address)
    device = host.interface
    commands = [f"addr del {host.address}/24 dev {device}", f"addr add {address}/24 dev {device}"]
    await _ip(commands, host.namespace)
    await _set_gateway(moved)
    return moved


async def _set_gateway(host: Host) -> None:
    if host.gateway is not None:
        await _ip([f"route add default via {host.gateway}"], host.namespace)


async def _set_link(host: Host, state: str) -> None:
    namespace, interface = host.plug
    await _ip([f"link set {interface} {state}"], namespace)


class _Workshop:
    """Builds namespaces, and remembers which."""

    def __init__(self) -> None:
        self._prefix = f"meshlab-{os.getpid()}-{next(_numbers)}"
        self.built: list[str] = []

    async def segment(self, network: str, roles: Sequence[str]) -> tuple[Host, ...]:
        """A switch with one host per role, numbered from `network`.1 on."""
        if not 1 <= len(roles) <= HOSTS_LIMIT:
            raise ValueError(f"a switch takes 1 to {HOSTS_LIMIT} hosts")
        bridge = await self._namespace("switch")
        await _ip(["link add bridge type bridge", "link set bridge up"], bridge)
        hosts = []
        for index, role in enumerate(roles):
            host = Host(
                namespace=await self._namespace(role),
                address=f"{network}.{index + 1}",
                interface=_OUTSIDE if role == _ROUTER else _CABLE,
                plug=(bridge, f"port{index}"),
            )
            await _plug_in(host)
            hosts.append(host)
        await _ip([f"link set {host.plug[1]} master bridge up" for host in hosts], bridge)
        return tuple(hosts)

    async def internet(self, *, public: int, behind: int, symmetric: bool) -> Internet:
        roles = ["public"] * public + [_ROUTER] * behind
        outside = await self.segment(_PUBLIC, roles)
        routers = outside[public:]
        inside = [await self._behind(router, number, symmetric) for number, router in enumerate(routers)]
        return Internet(public=outside[:public], routers=routers, behind=tuple(inside))

    async def _behind(self, router: Host, number: int, symmetric: bool) -> Host:
        network = f"192.168.{number + 1}"
        host = Host(
            namespace=await self._namespace("behind"),
            address=f"{network}.2",
            interface=_CABLE,
            plug=(router.namespace, _INSIDE),
            gateway=f"{network}.1",
        )
        await _plug_in(host)
        await _ip([f"addr add {network}.1/24 dev {_INSIDE}", f"link set {_INSIDE} up"], router.namespace)
        await _set_gateway(host)
        ports = " fully-random" if symmetric else ""
        await _nft(router.namespace, _NAT.format(outside=_OUTSIDE, inside=_INSIDE, ports=ports))
        return host

    async def _namespace(self, role: str) -> str:
        name = f"{self._prefix}-{role}{len(self.built)}"
        # Before it exists: what is half built has to go as well.
        self.built.append(name)
        await _ip([f"netns add {name}"])
        await _ip(["link set lo up"], name)
        await _exec(name, ["sh", "-c", _PREPARE, "sh", "1" if role == _ROUTER else "0"])
        return name

    async def tear_down(self) -> None:
        await _delete(self.built)


async def _plug_in(host: Host) -> None:
    far, port = host.plug
    cable = f"link add {port} netns {far} type veth peer name {host.interface} netns {host.namespace}"
    await _ip([cable])
    await _ip(
        [f"addr add {host.address}/24 dev {host.interface}", f"link set {host.interface} up"], host.namespace
    )


@asynccontextmanager
async def _workshop() -> AsyncIterator[_Workshop]:
    await _delete(_stale())
    workshop = _Workshop()
    try:
        yield workshop
    finally:
        await uninterrupted(workshop.tear_down(), "tear down networks")


def existing() -> list[str]:
    """The namespaces of this module that exist now, of whatever process."""
    return sorted(path.name for path in _FOLDER.glob("meshlab-*")) if _FOLDER.is_dir() else []


def _stale() -> list[str]:
    found = []
    for name in existing():
        match = _NAME.fullmatch(name)
        if match and not psutil.pid_exists(int(match[1])):
            found.append(name)
    return found


async def _delete(names: Sequence[str]) -> None:
    there = [name for name in names if (_FOLDER / name).exists()]
    if there:
        # -force goes on after a failure: another process may clear away the same stale ones.
        await run(["ip", "-force", "-batch", "-"], stdin=_lines("netns delete", there), timeout_s=COMMAND_S)


def _lines(verb: str, names: Sequence[str]) -> bytes:
    return "".join(f"{verb} {name}\n" for name in names).encode()


async def _ip(commands: Sequence[str], namespace: str | None = None) -> None:
    where = ["-n", namespace] if namespace else []
    await _checked(["ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


async def _nft(namespace: str, rules: str) -> None:
    await _exec(namespace, ["nft", "-f", "-"], rules)


async def _exec(namespace: str, argv: Sequence[str], stdin: str = "") -> None:
    await _checked(["ip", "netns", "exec", namespace, *argv], stdin)


async def _checked(argv: Sequence[str], stdin: str) -> None:
    finished = await run(argv, stdin=stdin.encode(), timeout_s=COMMAND_S)
    if finished.status != 0:
        said = " / ".join(finished.errors) or f"exit status {finished.status}"
        raise MeshError(f"{' '.join(argv[:5])}: {said}")
