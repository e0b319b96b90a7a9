"""`stop` and `leave`, and how every verb talks to the running node: through the socket in its home."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import click
import psutil

from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json
from mesh_llm.defaults import CONTROL_TIMEOUT_S, DRAIN_S, LOCK_POLL_S
from mesh_llm.errors import MeshError, NodeNotRunning
from mesh_llm.home import Home, demo_home, noted_homes

STOP_TIMEOUT_S = DRAIN_S + 30.0
"""For `mesh-llm stop` to see the node gone: others take over, it drains, its children end."""

_NAMED = 4
"""Other homes, in a hint: nobody reads more."""


async def call(
    home: Home,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    within_s: float = CONTROL_TIMEOUT_S,
) -> dict[str, Any]:
    """One request to the node on this home; what it refuses is raised as its sentence."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    connector = aiohttp.UnixConnector(path=str(home.control_socket))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://node{path}", json=body) as answer,
        ):
            document = await answer.json()
    except (aiohttp.ClientConnectionError, FileNotFoundError):
        # Refused, or cut off in the middle: the node has just ended.
        raise NodeNotRunning(f"no node is running on {home.path}", hint=_instead(home)) from None
    except TimeoutError:
        raise MeshError(
            f"the node on {home.path} does not answer", hint=f"see {home.log_folder / 'node.log'}"
        ) from None
    except (aiohttp.ClientError, ValueError):
        document = None
    if not isinstance(document, dict):
        raise MeshError(
            f"what the node on {home.path} answers cannot be read",
            hint=f"see {home.log_folder / 'node.log'}; a node of another version is to be started again",
        )
    if "error" in document:
        raise MeshError(document["error"], hint=document.get("hint"))
    return document


def running_home(given: Path | None) -> Home:
    """The home that is meant: the one that was named, the usual one, or the demo's if only that runs."""
    home = Home(home_path(given))
    demo = Home(demo_home())
    if given is not None or answers(home) or not answers(demo):
        return home
    click.echo(f"No node is running on {home.path}; this is the demo, on {demo.path}", err=True)
    return demo


def answers(home: Home) -> bool:
    """Whether a node runs there. One that hangs counts, too: it is named, and the question fails then."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONTROL_TIMEOUT_S)
        try:
            probe.connect(str(home.control_socket))
        except (OSError, MeshError):
            return False
    return True


def _instead(home: Home) -> str:
    """What somebody may have meant who asks where no node runs."""
    usual = "start one with mesh-llm, or give its --home"
    # Who names a home means that one.
    if home.path != Home(home_path(None)).path or "MESH_LLM_HOME" in os.environ:
        return usual
    demo = Home(demo_home())
    if answers(demo):
        return f"the demo runs: mesh-llm demo stop ends it; --home {shlex.quote(str(demo.path))} asks it"
    others = [str(other.path) for other in noted_homes() if answers(other)][:_NAMED]
    return f"these run: --home {' or --home '.join(map(shlex.quote, others))}" if others else usual


@click.command()
@home_option
@json_option
@debug_option
def stop(home: Path | None, as_json: bool, debug: bool) -> None:
    """Stop the running node after its open answers. Returns when the node has ended.

    It stays a member of its mesh, and returns to it when it is started again.
    """
    pid = _end(Home(home_path(home)), "/api/stop")
    if as_json:
        print_json({"stopped": pid})
    else:
        click.echo(f"Stopped the node with pid {pid}")


@click.command()
@home_option
@json_option
@debug_option
def leave(home: Path | None, as_json: bool, debug: bool) -> None:
    """Leave the mesh: others take over first, then the node ends and forgets its membership."""
    pid = _end(Home(home_path(home)), "/api/leave")
    if as_json:
        print_json({"left": pid})
    else:
        click.echo(f"Left the mesh; the node with pid {pid} has ended")


def _end(home: Home, path: str) -> int:
    pid = int(asyncio.run(call(home, "POST", path))["pid"])
    wait_until_gone(pid, home)
    return pid


def wait_until_gone(pid: int, home: Home) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _runs(pid):
        if time.monotonic() > deadline:
            raise MeshError(
                f"the node with pid {pid} was told to stop and is still running after {STOP_TIMEOUT_S:.0f} s",
                hint=f"kill -9 {pid} ends it, and its children with it",
            )
        time.sleep(LOCK_POLL_S / 4)


def _runs(pid: int) -> bool:
    try:
        # A zombie has let go of everything; its parent may be slow to notice.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
