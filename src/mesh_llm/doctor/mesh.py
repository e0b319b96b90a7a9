"""The running node, its peers and relay, versions, clocks: by what the node knows of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding, broken, ok, warning
from mesh_llm.errors import MeshError

RELAY_S = 5.0
"""For a relay of one's own to take a connection."""
CLOCK_APART_S = 60.0
"""A peer that began so far in our future has another clock: messages take a second at most."""
CLOCK_REFUSED_S = 86_400.0
"""A day: what is signed later than that is not taken any more."""
RESTARTS = 3
_LOGS = "mesh-llm logs"
_NOT_RUNNING = "no node runs on this home, so that nothing is known of its peers"

Document = Mapping[str, Any]


def node(context: CheckContext) -> Iterator[Finding]:
    if context.node_problem is not None:
        yield broken(
            context.node_problem.message,
            why="it holds the home and its port, and serves nobody",
            mend=f"mesh-llm stop; else kill the process that holds {context.home.run_folder / 'node.lock'}",
        )
        return
    if context.node is None:
        yield ok("no node runs on this home")
        return
    status = context.node.status
    state, reason = status["node"]["state"], status["node"]["reason"]
    if state == "failed":
        yield broken(f"the node has failed: {reason}", why="it answers no request", mend=_LOGS)
    elif state == "waiting":
        mend = "join another machine (mesh-llm invite), or choose a smaller model (mesh-llm models)"
        yield warning(f"the node waits: {reason}", why="it answers no request until then", mend=mend)
    else:
        yield ok(f"the node is {state}{f': {reason}' if reason else ''}")
    if (restarts := status["engine"]["restarts"]) >= RESTARTS:
        why = "each crash interrupts answers; memory, a driver or the model may be the cause"
        yield warning(f"the engine was restarted {restarts} times", why=why, mend=_LOGS)


# -- the ways to others ---------------------------------------------------------------------------


def peers(context: CheckContext) -> Iterator[Finding]:
    """UDP in both directions: a direct connection has acknowledged packets both ways."""
    members = _members(context)
    if members is None:
        yield ok(_NOT_RUNNING)
        return
    if not members:
        yield ok("no other node is in the mesh")
    for member in members:
        yield _path(context, member)


def _path(context: CheckContext, member: Document) -> Finding:
    name, kind = member["name"], member["kind"]
    port = _own_port(context)
    mend = (
        f"allow UDP port {port} in the firewall here, and that of {name} there "
        "(mesh-llm doctor firewall, on both); or a relay: mesh-llm relay"
    )
    if member["standing"] in ("dead", "suspect"):
        tried = ", ".join(member["addresses"]) or "any address"
        # Perhaps it is only switched off.
        return warning(
            f"{name} does not answer ({member['standing']}) at {tried}",
            why="its memory and its model are missing for plans",
            mend=f"check that {name} runs (mesh-llm status, there); {mend}",
        )
    if not member["connected"]:
        via = ", ".join(member["via"]) or "nobody"
        return broken(
            f"no packets get through to {name} directly; {via} passes messages on",
            why="layers of a model are not put there while it cannot be reached",
            mend=mend,
        )
    if kind == "relay":
        return warning(
            f"{name} is reached through a relay: UDP does not get through directly, in one direction or both",
            why="a relay adds its delay to every token, and has less throughput",
            mend=mend,
        )
    rtt = member["rtt_ms"]
    shown = f", {rtt:.1f} ms" if isinstance(rtt, int | float) else ""
    return ok(f"{name}: {kind}{shown}, packets both ways")


def _own_port(context: CheckContext) -> int:
    assert context.node is not None
    return int((context.node.network.get("ports") or [0])[0])


def relay(context: CheckContext) -> Iterator[Finding]:
    known = context.node.network.get("relay", {}) if context.node is not None else {}
    if known.get("off"):
        yield ok("no relay is used (--no-relay)")
        return
    url = _own_relay(context)
    if url is not None and (why := _refusal(url)) is not None:
        yield broken(
            f"the relay {url} does not answer: {why}",
            why="nodes behind NATs or firewalls do not find each other without it",
            mend=f"mesh-llm relay, on {urlsplit(url).hostname}; or choose another one: --relay URL",
        )
    elif known.get("reached"):
        yield ok(f"connected to the relay {known['reached']}")
    elif context.node is not None:
        yield warning(
            f"the node has not reached {f'the relay {url}' if url else 'a public relay'}",
            why="nodes behind NATs or firewalls cannot reach this one",
            mend="check that HTTPS gets out of this machine; or --relay URL (your own), or --no-relay",
        )
    else:
        yield ok(f"the relay {url} takes connections" if url else "this home remembers no relay of its own")


def _own_relay(context: CheckContext) -> str | None:
    document: Document = {}
    with suppress(MeshError, OSError):
        document = context.home.read_mesh() or {}
    url = document.get("relay")
    return url if isinstance(url, str) else None


def _refusal(url: str) -> str | None:
    """Why nobody listens there; a node that was connected notices it late. Public relays are not asked."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=RELAY_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# -- versions and clocks --------------------------------------------------------------------------


def versions(context: CheckContext) -> Iterator[Finding]:
    members = _members(context)
    if members is None:
        yield ok(f"mesh-llm {__version__}, engine {ENGINE_VERSION}")
        return
    assert context.node is not None
    same = True
    if (running := context.node.status["version"]) != __version__:
        same = False
        why = "the node was started before the update"
        mend = "mesh-llm stop, then start it again"
        yield warning(f"the running node is {running}, this command {__version__}", why=why, mend=mend)
    for member in members:
        if member["engine"] not in ("", ENGINE_VERSION) and member["role"] != "client":
            same = False
            yield broken(
                f"{member['name']} has engine {member['engine']}, this node {ENGINE_VERSION}",
                why="nodes with different engines do not compute together",
                mend=f"update the older one ({member['name']} has mesh-llm {member['version']})",
            )
        elif member["version"] != __version__:
            same = False
            yield warning(
                f"{member['name']} has mesh-llm {member['version']}, this node {__version__}",
                why="neighbouring versions work together; what is new works once all have it",
                mend="update the older one",
            )
    if same:
        yield ok(f"mesh-llm {__version__}, engine {ENGINE_VERSION}, on all {len(members) + 1} nodes")


def clocks(context: CheckContext) -> Iterator[Finding]:
    """By when members began, as they say: later than now means that their clock is ahead of ours."""
    members = _members(context)
    if members is None:
        return
    apart = [(member["name"], member["started_s"] - context.now()) for member in members]
    ahead = [(name, seconds) for name, seconds in apart if seconds > CLOCK_APART_S]
    for name, seconds in ahead:
        yield (broken if seconds > CLOCK_REFUSED_S else warning)(
            f"the clock of {name} is at least {seconds / 60:.0f} minutes ahead of this machine's",
            why="invites expire by the clock, and what is signed more than a day ahead is refused",
            mend=f"sudo timedatectl set-ntp true, here and on {name}",
        )
    if members and not ahead:
        yield ok("no clock of another node is ahead of this one")


def _members(context: CheckContext) -> list[Document] | None:
    """The others; None where no node runs that could tell."""
    return None if context.node is None else list(context.node.network.get("members", ()))
