"""`mesh-llm share`: the API and the chat for guests on the local network."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.control import call
from mesh_llm.cli.invite import parse_span
from mesh_llm.cli.keys import limit_options
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import is_terminal, print_json
from mesh_llm.errors import UsageError
from mesh_llm.home import Home


@click.command()
@click.option("--name", metavar="GUEST", help="what the guest's key is called (default: guest, guest-2, …)")
@click.option("--expires", metavar="SPAN", default="1d", show_default=True, help="30m, 12h, 7d, 4w, or never")
@limit_options
@click.option("--listen", metavar="ADDRESS", help="of this machine; default: the one on the local network")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="default: 9338; 0 takes any free one"
)
@click.option("--stop", is_flag=True, help="close the port to the local network")
@click.option("--revoke", is_flag=True, help="with --stop: take all guests' keys back, too")
@home_option
@json_option
@debug_option
def share(
    name: str | None,
    expires: str,
    stop: bool,
    revoke: bool,
    home: Path | None,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Let a guest on the local network chat, and use the API, with a key of their own.

    Opens a second port of the running node, with TLS, and prints an address and its QR code: a phone that
    opens it is in the chat. Guests may ask and nothing else; the console is not there.
    """
    where = Home(home_path(home))
    if revoke and not stop:
        raise UsageError("--revoke goes with --stop", hint="mesh-llm keys revoke NAME takes one key back")
    if stop:
        _show_end(asyncio.run(call(where, "POST", "/api/stop-sharing", {"revoke": revoke})), as_json)
        return
    body = {"name": name, "lifetime_s": parse_span(expires), **options}
    answer = asyncio.run(call(where, "POST", "/api/share", body))
    del answer["picture"]  # for a page
    if as_json:
        print_json(answer)
    else:
        _show(answer)


def _show(answer: dict[str, Any]) -> None:
    name, expires = answer["name"], answer["expires"]
    until = "" if expires is None else time.strftime(" until %Y-%m-%d %H:%M", time.localtime(expires))
    click.echo(f"{name} may chat{until}, at this address:\n")
    click.echo(f"{answer['url']}\n")
    _draw(answer["url"])
    if answer["own_certificate"]:
        click.echo(
            "The browser will warn that it cannot verify this machine: the certificate was made\n"
            "here, and no authority has signed it. Compare its SHA-256 fingerprint, which the browser\n"
            "shows with the certificate's details, and go on (Advanced, Proceed) if it is this one:\n"
        )
        half = len(answer["fingerprint"]) // 2 + 1
        click.echo(f"  {answer['fingerprint'][:half]}\n  {answer['fingerprint'][half:]}\n")
    click.echo(f"Programs use {answer['api']} with the key behind #key= of the address.")
    click.echo(f"mesh-llm keys revoke {name} takes the key back; mesh-llm share --stop closes the port.")


def _draw(url: str) -> None:
    """As a QR code: blocks are light, so the rest has to be dark, whatever the terminal's colours are."""
    import segno

    drawn = io.StringIO()
    segno.make(url, error="l", micro=False).terminal(out=drawn, border=2, compact=True)
    colours, plain = ("\033[97;40m", "\033[0m") if is_terminal(sys.stdout) else ("", "")
    with suppress(UnicodeEncodeError):  # a terminal of old, without such letters
        click.echo("".join(f"{colours}{line}{plain}\n" for line in drawn.getvalue().splitlines()))


def _show_end(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    stopped = answer["stopped"]
    click.echo(f"No longer shared at {stopped}" if stopped else "This node was not shared")
    if answer["revoked"]:
        click.echo(f"Revoked {', '.join(answer['revoked'])}")
