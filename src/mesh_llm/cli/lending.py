"""`mesh-llm pause` and `resume`: whether this machine computes for others, from now on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from mesh_llm.cli import tables
from mesh_llm.cli.control import call, running_home
from mesh_llm.cli.options import debug_option, home_option, json_option
from mesh_llm.cli.output import print_json
from mesh_llm.defaults import HAND_OVER_S
from mesh_llm.home import Home
from mesh_llm.status_schema import Status, from_document

SETTLE_S = 2 * HAND_OVER_S
"""For others to take over, or for nobody to be able to: answers under way may take longer to end."""
_LOOK_S = 0.25


@click.command()
@home_option
@json_option
@debug_option
def pause(home: Path | None, as_json: bool, debug: bool) -> None:
    """Lend nothing until mesh-llm resume: others take over first, as far as they can hold the models.

    The node stays in its mesh, and its API goes on with what others compute. It
    lends again when it is started anew.
    """
    status = asyncio.run(_settled(running_home(home), "/api/pause"))
    lent = tables.lent_bytes(status)
    still = f"{tables.size(lent)} are lent until open answers end" if lent else "this node lends nothing"
    _tell(status, f"Paused: {still}; mesh-llm resume lends again", as_json=as_json)


@click.command()
@home_option
@json_option
@debug_option
def resume(home: Path | None, as_json: bool, debug: bool) -> None:
    """Lend again; also while --lend says otherwise, until its reason is gone."""
    where = running_home(home)
    asyncio.run(call(where, "POST", "/api/resume"))
    status = _status(asyncio.run(call(where, "GET", "/api/status")))
    # What kept it from answering is over, and status still tells of it.
    _tell(
        status, f"Lending again: {tables.lends(status)}", why="the next plan is being made", as_json=as_json
    )


async def _settled(home: Home, path: str) -> Status:
    """The status once this node has no part in a plan."""
    await call(home, "POST", path)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        status = _status(await call(home, "GET", "/api/status"))
        if not tables.lent_bytes(status) or asyncio.get_running_loop().time() > deadline:
            return status
        await asyncio.sleep(_LOOK_S)


def _status(document: object) -> Status:
    return from_document(Status, document)


def _tell(status: Status, done: str, *, why: str | None = None, as_json: bool) -> None:
    serving = status.node.state == "serving"
    if as_json:
        lent = tables.lent_bytes(status)
        print_json({"paused": status.node.paused, "lent_bytes": lent, "serving": serving})
        return
    click.echo(done)
    if not serving:
        why = why or status.node.reason or status.node.state
        click.echo(f"Nothing answers at present: {why}", err=True)
