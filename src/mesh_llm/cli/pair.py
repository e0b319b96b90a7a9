"""`mesh-llm invite --pair` and `mesh-llm join`: a short code instead of a token, on one network."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from mesh_llm.cli import secret
from mesh_llm.cli.config_file import Configured
from mesh_llm.cli.control import call
from mesh_llm.cli.options import node_config, node_options
from mesh_llm.cli.serve import run_with_options
from mesh_llm.errors import JoinRefused, MeshError, UsageError
from mesh_llm.home import Home
from mesh_llm.pairing.announcement import FoundMesh, find
from mesh_llm.pairing.exchange import CODE_DIGITS, typed
from mesh_llm.pairing.joiner import pair
from mesh_llm.transport.invite import PREFIX

_LOOK_S = 4.0
_LOOK_FOR_S = 15.0
"""For a mesh that was named."""
_POLL_S = 0.5
_CODES = 3
"""Wrong ones that somebody may type before the command ends."""


def offer(home: Home, *, role: str, label: str | None) -> None:
    """Open the running node's mesh for ten minutes, show the code, ask about who comes.

    A person is asked outside of any event loop: Ctrl-C ends a question there, and no thread that still
    reads the terminal keeps the command alive.
    """
    is_refused = False
    try:
        try:
            begun = _told(home, "POST", "/api/pair", {"role": role, "label": label})
        except MeshError:
            is_refused = True
            raise
        click.echo(f"Announced on this network as {begun['label']!r} for ten minutes.")
        click.echo("On the other machine type: mesh-llm join")
        click.echo(f"Code: {begun['code']}")
        while (state := _told(home, "GET", "/api/pair"))["open"]:
            if (waiting := state["waiting"]) is not None:
                _decide(home, waiting)
            time.sleep(_POLL_S)
    except BaseException:
        # By Ctrl-C, too, and while it is being opened: the node may have heard of it.
        if not is_refused:
            with suppress(MeshError):
                _told(home, "POST", "/api/pair-end", {})
        raise
    state = _told(home, "POST", "/api/pair-end", {})
    if state["admitted"] is None:
        raise MeshError("nobody was let in", hint="start again with `mesh-llm invite --pair`")
    click.echo(f"{state['admitted']} is let in")


def _told(home: Home, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return asyncio.run(call(home, method, path, body))


def _decide(home: Home, waiting: dict[str, Any]) -> None:
    asked = f"{waiting['name']} ({waiting['address']}) knows the code. Let it in?"
    accept = click.confirm(asked, default=False)
    try:
        _told(home, "POST", "/api/pair-answer", {"id": waiting["id"], "accept": accept})
    except MeshError as error:
        click.echo(error.message, err=True)


@click.command(cls=Configured)
@click.argument("mesh", metavar="[MESH|TOKEN]", required=False)
@node_options
def join(mesh: str | None, **options: Any) -> None:
    """Join a mesh of this network by the code on its owner's screen, and run a node of it.

    The owner types `mesh-llm invite --pair`. Without MESH, the name under which it is announced, you choose
    from what is found. A TOKEN works as with --join.
    """
    if options["join"] is not None:
        raise UsageError("mesh-llm join finds a mesh by itself", hint="leave out join, or --join")
    # The variable, where a token was typed: it is hidden there.
    if mesh is not None and (mesh.startswith(PREFIX) or mesh == f"${secret.VARIABLES['--join']}"):
        options["join"] = mesh
        run_with_options(node_config(options), options)
        return
    if options["api_key"] == "-":
        raise UsageError(
            "--api-key - and the code cannot both be read from standard input",
            hint="--api-key @FILE, or set MESH_LLM_API_KEY",
        )
    # Once: secrets of the environment are taken out of it. And what is wrong with the options is said
    # before anybody walks to another machine.
    config = node_config(options)
    if config.join is not None:
        raise UsageError("mesh-llm join finds a mesh by itself", hint="unset MESH_LLM_JOIN")
    replace(config, join=PREFIX)
    token = _paired(mesh, config.name or socket.gethostname(), config.bind_ip)
    run_with_options(replace(config, join=token), options)


def _paired(label: str | None, name: str, bind_ip: str | None) -> str:
    """The token; a person is asked outside of any event loop, as by `offer`."""
    found = _found(label, bind_ip)
    click.echo(f"Joining {found.label!r}. The code stands on its owner's screen.")
    for left in reversed(range(_CODES)):
        code = _ask_code()
        try:
            return asyncio.run(pair(found, code=code, name=name, bind_ip=bind_ip, on_proven=_on_proven))
        except JoinRefused as error:
            if not left or error.message != "the code is wrong" or not sys.stdin.isatty():
                raise
            click.echo(f"{error.message}: {error.hint}", err=True)
    raise AssertionError("the last try returns or raises")


def _on_proven() -> None:
    click.echo("The code is right. Waiting for the owner to agree …")


def _found(label: str | None, bind_ip: str | None) -> FoundMesh:
    click.echo("Looking for meshes on this network …", err=True)
    within_s = _LOOK_S if label is None else _LOOK_FOR_S
    offers = asyncio.run(find(within_s=within_s, ip=bind_ip, label=label))
    named = [each for each in offers if label in (None, each.label)]
    if not named:
        others = f"; there is {', '.join(repr(each.label) for each in offers)}" if offers else ""
        raise MeshError(
            f"no mesh {'is announced' if label is None else f'called {label!r} is announced'} here{others}",
            hint="its owner types `mesh-llm invite --pair`, on this network; elsewhere use an invite token",
        )
    if len(named) == 1:
        return named[0]
    for number, each in enumerate(named, 1):
        click.echo(f"{number}. {each.label} ({', '.join(each.address.direct)})")
    number = click.prompt("Which one", type=click.IntRange(1, len(named)), default=None)
    return named[number - 1]


def _ask_code() -> str:
    while (code := typed(click.prompt("Code"))) is None:
        click.echo(f"a code has {CODE_DIGITS} digits", err=True)
    return code
