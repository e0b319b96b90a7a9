"""`stop` and `leave`, and how every verb talks to the running node: through the socket in its home."""

from __future__ import annotations

import asyncio
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
from mesh_llm.home import Home

STOP_TIMEOUT_S = DRAIN_S + 30.0
"""For `mesh-llm stop` to see the node gone: others take over, it drains, its children end."""


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
        raise NodeNotRunning(
            f"no node is running on {home.path}", hint="start one with mesh-llm, or give its --home"
        ) from None
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
