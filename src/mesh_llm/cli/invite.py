"""`mesh-llm invite`: tokens for other machines, and taking them back."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.errors import UsageError
from mesh_llm.home import Home

_SPAN = re.compile(r"^(\d{1,6})([smhdw])$")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@click.group(invoke_without_command=True)
@click.option("--role", type=click.Choice(("owner", "node", "client")), default="node", show_default=True)
@click.option("--expires", metavar="SPAN", default="7d", show_default=True, help="30m, 12h, 7d, 4w, or never")
@click.option(
    "--uses",
    type=click.IntRange(1),
    metavar="N",
    help="how many nodes may join with it (default: any number)",
)
@click.option("--pair", is_flag=True, help="let a machine of this network in by a short code instead")
@click.option("--as", "label", metavar="NAME", help="announce the mesh under this name, with --pair")
@home_option
@json_option
@debug_option
@click.pass_context
def invite(
    ctx: click.Context,
    role: str,
    expires: str,
    uses: int | None,
    pair: bool,
    label: str | None,
    home: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Make a token that lets another machine into the mesh of the running node.

    A node lends its memory and may invite others; a client only uses the API. An owner is a node that also
    sets the mesh's model and options, and may revoke any invite: the mesh outlives the machine that made it.
    """
    if ctx.invoked_subcommand is not None:
        return
    if label is not None and not pair:
        raise UsageError("--as names what --pair announces", hint="add --pair")
    if pair:
        from mesh_llm.cli.pair import offer

        offer(Home(home_path(home)), role=role, label=label)
        return
    body = {"role": role, "lifetime_s": parse_span(expires), "uses": uses}
    answer = asyncio.run(call(Home(home_path(home)), "POST", "/api/invite", body))
    if as_json:
        print_json(answer)
    else:
        click.echo(answer["token"])


@invite.command("list")
@home_option
@json_option
@debug_option
def list_invites(home: Path | None, as_json: bool, debug: bool) -> None:
    """List the invites that the running node made, and how many nodes joined with each."""
    answer = asyncio.run(call(Home(home_path(home)), "GET", "/api/invites"))
    if as_json:
        print_json(answer)
        return
    rows = [_row(entry) for entry in answer["invites"]]
    if not rows:
        click.echo("This node has made no invites")
        return
    print_table(rows, headers=("id", "role", "state", "expires", "came in"))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    expires = entry["expires"]
    when = "never" if expires is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    uses = str(entry["uses"]) if entry["limit"] is None else f"{entry['uses']} of {entry['limit']}"
    return entry["id"], entry["role"], entry["state"], when, uses


@invite.command("revoke")
@click.argument("id", metavar="ID|NAME")
@home_option
@json_option
@debug_option
def revoke(id: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Revoke an invite, and expel everyone who joined with it.

    Name it by its id, or by a member that joined with it; where two nodes have made one of that id, as
    MAKER:ID. Owners may revoke any invite, other nodes their own and those made by nodes that they let in.
    """
    answer = asyncio.run(call(Home(home_path(home)), "POST", "/api/revoke", {"id": id}))
    if as_json:
        print_json(answer)
    elif answer["expelled"]:
        click.echo(f"Revoked {answer['id']}; expelled {', '.join(answer['expelled'])}")
    else:
        click.echo(f"Revoked {answer['id']}; no member that is here joined with it")


def parse_span(text: str) -> float | None:
    """`7d`, `12h` in seconds; None for `never`."""
    if text == "never":
        return None
    match = _SPAN.match(text)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--expires {text} is not a duration", hint="30m, 12h, 7d, 4w, or never")
    return float(int(match[1]) * _UNIT_S[match[2]])


@click.command()
@click.argument("name")
@home_option
@json_option
@debug_option
def promote(name: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Make a member an owner of the mesh.

    Owners set the model and the plan's options, and may revoke any invite. `invite revoke` takes it back,
    and expels that machine.
    """
    answer = asyncio.run(call(Home(home_path(home)), "POST", "/api/promote", {"name": name}))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['name']} is an owner of the mesh now")
