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
@click.option("--role", type=click.Choice(("node", "client")), default="node", show_default=True)
@click.option("--expires", metavar="SPAN", default="7d", show_default=True, help="30m, 12h, 7d, 4w, or never")
@home_option
@json_option
@debug_option
@click.pass_context
def invite(
    ctx: click.Context, role: str, expires: str, home: Path | None, as_json: bool, debug: bool
) -> None:
    """Make a token that lets another machine into the mesh of the running node.

    A node lends its memory and may invite others; a client only uses the API.
    """
    if ctx.invoked_subcommand is not None:
        return
    body = {"role": role, "lifetime_s": parse_span(expires)}
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
    """The invites that the running node made, and how many came in by each."""
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
    return entry["id"], entry["role"], entry["state"], when, str(entry["uses"])


@invite.command("revoke")
@click.argument("id")
@home_option
@json_option
@debug_option
def revoke(id: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Take an invite back, and expel those who came in by it."""
    answer = asyncio.run(call(Home(home_path(home)), "POST", "/api/revoke", {"id": id}))
    if as_json:
        print_json(answer)
    elif answer["expelled"]:
        click.echo(f"Revoked {id}; expelled {', '.join(answer['expelled'])}")
    else:
        click.echo(f"Revoked {id}")


def parse_span(text: str) -> float | None:
    """`7d`, `12h` in seconds; None for `never`."""
    if text == "never":
        return None
    match = _SPAN.match(text)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--expires {text}: that is no span of time", hint="30m, 12h, 7d, 4w, or never")
    return float(int(match[1]) * _UNIT_S[match[2]])
