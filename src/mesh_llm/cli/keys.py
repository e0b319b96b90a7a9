"""`mesh-llm keys`: API keys with names, rights, limits and usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mesh_llm.cli import tables
from mesh_llm.cli.control import call
from mesh_llm.cli.invite import parse_span
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.errors import NodeNotRunning
from mesh_llm.gateway.key_usage import KeyUsage
from mesh_llm.gateway.keys import Keys, NewKey
from mesh_llm.home import Home
from mesh_llm.report.key_status import key_statuses
from mesh_llm.status_schema import KeyStatus, Status, from_document, to_document

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(function: F) -> F:
    """Of a key that is being made."""
    for option, what in (
        ("--tokens-per-day", "tokens of prompts and answers"),
        ("--requests-per-day", "requests"),
    ):
        function = click.option(option, type=click.IntRange(1), metavar="N", help=f"most {what} a day (UTC)")(
            function
        )
    return function


@click.group()
def keys() -> None:
    """Make, list and revoke API keys, and show what was asked with each.

    They hold for the node on this home, running or not, beside the key of --api-key. A change holds at once.
    """


@keys.command()
@click.argument("name")
@click.option("--manage", is_flag=True, help="may also change what is served, and read /metrics")
@click.option(
    "--expires", metavar="SPAN", default="never", show_default=True, help="30m, 12h, 7d, 4w, or never"
)
@limit_options
@home_option
@json_option
@debug_option
def add(
    name: str,
    manage: bool,
    expires: str,
    requests_per_day: int | None,
    tokens_per_day: int | None,
    home: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Make a key, and print it. It is shown this once: only a hash of it is kept."""
    wanted = NewKey(
        name=name,
        manage=manage,
        lifetime_s=parse_span(expires),
        requests_per_day=requests_per_day,
        tokens_per_day=tokens_per_day,
    )
    key, secret = _keys(home).add(wanted, time.time())
    if as_json:
        print_json({"name": key.name, "key": secret, "manage": key.manage, "expires": key.expires})
    else:
        click.echo(secret)


@keys.command("list")
@home_option
@json_option
@debug_option
def list_keys(home: Path | None, as_json: bool, debug: bool) -> None:
    """List the keys, what each may do, and until when."""
    found = _known(home)
    if as_json:
        print_json({"keys": to_document(found)})
    elif found:
        print_table(
            [_row(key) for key in found], headers=("key", "may", "expires", "requests a day", "tokens a day")
        )
    else:
        click.echo("There are no named keys")


@keys.command()
@click.argument("name")
@home_option
@json_option
@debug_option
def revoke(name: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Take a key back. Its next request is refused; answers under way are finished."""
    key = _keys(home).revoke(name)
    if as_json:
        print_json({"revoked": key.name})
    else:
        click.echo(f"Revoked {key.name}")


@keys.command()
@home_option
@json_option
@debug_option
def usage(home: Path | None, as_json: bool, debug: bool) -> None:
    """Show the requests and tokens of each key, today (UTC) and in all."""
    found = _known(home)
    if as_json:
        print_json({"keys": to_document(found)})
    elif found:
        print_table([tables.key_usage(key) for key in found], headers=tables.KEY_USAGE)
    else:
        click.echo("There are no named keys")


def _row(key: KeyStatus) -> tuple[str, ...]:
    when = "never" if key.expires is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(key.expires))
    return (
        key.name,
        "manage" if key.manage else "ask",
        f"{when} (expired)" if key.expired else when,
        *("-" if limit is None else f"{limit:,}" for limit in (key.requests_per_day, key.tokens_per_day)),
    )


def _keys(home: Path | None) -> Keys:
    where = Home(home_path(home))
    return Keys(where.keys_file)


def _known(home: Path | None) -> tuple[KeyStatus, ...]:
    """As the running node counts; without one, as it has written them down."""
    where = Home(home_path(home))
    try:
        status = asyncio.run(call(where, "GET", "/api/status"))
    except NodeNotRunning:
        return key_statuses(KeyUsage(Keys(where.keys_file), where.key_usage_file).reports())
    return from_document(Status, status).api.keys
