"""Ports, addresses, firewall of this machine."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import socket
from collections.abc import Iterator, Sequence

import psutil

from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding, broken, ok, warning
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.gateway import ports as gateway_ports
from mesh_llm.transport.endpoint import Reach, reach_of

TOOL_S = 5.0
"""For a program of the system's that only reads something."""
_DROPS = ("policy drop", "-P INPUT DROP", "-P INPUT REJECT")


# -- ports ----------------------------------------------------------------------------------------


def ports(context: CheckContext) -> Iterator[Finding]:
    if context.node is not None:
        yield ok(f"the running node has its ports: {context.node.status['api']['url'] or 'API not open yet'}")
        return
    problems = [*_tcp(context), *_udp(context)]
    yield from problems
    if not problems:
        yield ok(f"API port {context.port} on {context.listen} is free")


def _tcp(context: CheckContext) -> Iterator[Finding]:
    wanted = [("--port", context.listen, context.port)]
    if context.console is not None:
        wanted.append(("--console", "127.0.0.1", context.console))
    for option, listen, port in wanted:
        try:
            gateway_ports.bind(listen, port, option=option).close()
        except MeshError as error:
            yield broken(
                error.message,
                why="a node does not start without its port",
                mend=error.hint or f"choose another one: mesh-llm {option} 0",
            )


def _udp(context: CheckContext) -> Iterator[Finding]:
    address = context.bind_ip or "0.0.0.0"
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        mend = "give an address that ip addr shows"
        yield broken(f"--bind-ip {address} is not an IP address", why="QUIC cannot be bound to it", mend=mend)
        return
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, context.bind_port))
        except OSError as error:
            yield _udp_refusal(error, address, context.bind_port)


def _udp_refusal(error: OSError, address: str, port: int) -> Finding:
    why = "other nodes reach this one over that UDP port alone"
    if error.errno == errno.EADDRINUSE:
        holder = _udp_holder(port)
        return broken(
            f"UDP port {port} is in use{f' by {holder}' if holder else ''}",
            why=why,
            mend="end that program, or choose another --bind-port; 0 takes any free one",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return broken(
            f"--bind-ip {address} is not an address of this machine",
            why=why,
            mend="ip addr shows its addresses; leave --bind-ip out to use all of them",
        )
    mend = "choose a --bind-port above 1023" if error.errno == errno.EACCES else "choose another --bind-port"
    return broken(f"UDP port {port}: {os.strerror(error.errno or 0)}", why=why, mend=mend)


def _udp_holder(port: int) -> str | None:
    try:
        for each in psutil.net_connections(kind="udp"):
            if each.laddr and each.laddr.port == port and each.pid is not None:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    except (psutil.Error, OSError):
        pass
    return None


# -- addresses ------------------------------------------------------------------------------------

_ALL = ("0.0.0.0", "::")


def addresses(context: CheckContext) -> Iterator[Finding]:
    by_reach = _by_reach()
    lan, tunnels = by_reach.get(Reach.DIRECT, []), by_reach.get(Reach.TUNNEL, [])
    if lan:
        bound = context.bind_ip not in (None, *_ALL)
        yield ok(f"reachable at {f'{context.bind_ip} alone (--bind-ip)' if bound else ', '.join(lan)}")
    elif not tunnels:
        yield warning(
            "this machine has no address but its own loopback and bridges to its containers",
            why="no other machine can reach it directly",
            mend="connect it to a network; ip addr shows its addresses",
        )
    if tunnels:
        first = lan[0].split()[0] if lan else "IP"
        yield warning(
            f"a VPN is up: {', '.join(tunnels)}",
            why="links to machines nearby may take the way through it, which is slower",
            mend=f"mesh-llm --bind-ip {first}, if other machines are not to be reached through the VPN",
        )
    if len({text.split()[1] for text in lan}) > 1:
        yield ok("several networks: the fastest direct path is used; --bind-ip IP keeps to one")
    if inner := by_reach.get(Reach.INNER, []):
        yield ok(f"bridges to containers are told to others last: {', '.join(inner)}")


def _by_reach() -> dict[Reach, list[str]]:
    """`IP (INTERFACE)` of each interface that is up."""
    found: dict[Reach, list[str]] = {}
    up = {name for name, each in psutil.net_if_stats().items() if each.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name not in up or address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = ipaddress.ip_address(address.address.partition("%")[0])
            found.setdefault(reach_of(ip, name), []).append(f"{ip} ({name})")
    return found


# -- firewall -------------------------------------------------------------------------------------


async def firewall(context: CheckContext) -> list[Finding]:
    """Whether packets from other machines are dropped by default, and no rule names our UDP port."""
    rules = await _rules()
    if rules is None:
        return [ok("no firewall whose rules this user may read; root sees more")]
    tool, lines = rules
    if not any(drop in line for drop in _DROPS for line in lines):
        return [ok(f"the firewall ({tool}) lets packets in")]
    port = _udp_port(context)
    if port and any(f"{port}" in line.replace(",", " ").split() and "udp" in line for line in lines):
        return [ok(f"the firewall ({tool}) has a rule for UDP port {port}")]
    fixed = "" if port else " (choose a fixed port first: --bind-port 9338)"
    return [
        warning(
            f"the firewall ({tool}) drops incoming packets, and no rule names "
            + (f"UDP port {port}" if port else "a UDP port of this node"),
            why="nodes behind another firewall or NAT reach this one only through a relay, which is slower",
            mend=_opening(port or 9338) + fixed,
        )
    ]


def _udp_port(context: CheckContext) -> int:
    if context.node is not None and (bound := context.node.network.get("ports")):
        return int(bound[0])
    return context.bind_port


async def _rules() -> tuple[str, Sequence[str]] | None:
    for program, arguments in (("nft", ("list", "ruleset")), ("iptables", ("-S", "INPUT"))):
        if (path := shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")) is None:
            continue
        try:
            finished = await run([path, *arguments], timeout_s=TOOL_S)
        except MeshError:
            continue
        # An empty rule set is no rules; one that may not be read is not known.
        if finished.status == 0:
            return program, _incoming(finished.output)
    return None


def _incoming(lines: Sequence[str]) -> list[str]:
    """Of nft's listing, the chains on the way in; iptables was asked for no others."""
    if not any(line.lstrip().startswith("table ") for line in lines):
        return list(lines)
    kept: list[str] = []
    chain: list[str] = []
    for line in lines:
        if line.lstrip().startswith("chain "):
            chain = []
        chain.append(line)
        if line.strip() == "}" and any("hook input" in each for each in chain):
            kept += chain
            chain = []
    return kept


def _opening(port: int) -> str:
    if shutil.which("ufw"):
        return f"sudo ufw allow {port}/udp"
    if shutil.which("firewall-cmd"):
        return f"sudo firewall-cmd --permanent --add-port={port}/udp && sudo firewall-cmd --reload"
    if shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"):
        return f"sudo nft insert rule inet filter input udp dport {port} accept"
    return f"sudo iptables -I INPUT -p udp --dport {port} -j ACCEPT"
