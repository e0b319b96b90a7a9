"""Secrets that a person passes: by file, standard input, environment, or typed and hidden at once."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from mesh_llm.errors import UsageError

VARIABLES = {
    "--join": "MESH_LLM_JOIN",
    "--api-key": "MESH_LLM_API_KEY",
    "--token": "MESH_LLM_RELAY_TOKEN",
}
"""Options that take a secret, and the variable that stands for each."""
TOKEN = re.compile(r"\s*mesh[0-9]{1,4}-.{40,}", re.DOTALL)
"""An invite token, wherever it stands behind `mesh-llm join`: no name of a mesh is like one."""
_LIMIT_BYTES = 64 << 10
"""Of what is read: invite tokens have some hundred characters."""
_STDIN_S = 60.0
"""For whoever writes to our standard input: `ssh … mesh-llm invite` asks for a password first."""


def hide() -> None:
    """Take secrets off the command line, which every user of the machine can read (`ps`).

    The process starts itself anew, under the same pid, with the secret in its environment, which
    only its owner can read. Overwriting the arguments in memory would do as well, but each system
    keeps them elsewhere and none documents it; exec is the same on Linux and macOS. Either way they
    are visible for the moment that the interpreter takes to start: a file or standard input has none.
    """
    given = sys.argv[1:]
    shown, secrets = without_secrets(given)
    head = len(sys.orig_argv) - len(given)
    if not secrets or not sys.executable or sys.orig_argv[head:] != given:
        return
    # Where it cannot be started anew it goes on as it is: the secret is asked for and must count.
    with suppress(OSError):
        # Not by orig_argv[0]: a bare name would be looked up again, and may be another Python.
        argv = [sys.executable, *sys.orig_argv[1:head], *shown]
        os.execve(sys.executable, argv, {**os.environ, **secrets})


def without_secrets(arguments: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """A command line with variables in the place of secrets, and the values of these."""
    shown: list[str] = []
    secrets: dict[str, str] = {}

    def moved(option: str, value: str) -> str:
        if _is_elsewhere(option, value):
            return value
        secrets[VARIABLES[option]] = value
        return f"${VARIABLES[option]}"

    option = None
    given = list(arguments)
    if given[:1] == ["join"]:
        given = [moved("--join", each) if TOKEN.fullmatch(each) else each for each in given]
    for number, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if option is not None:
            shown.append(moved(option, argument))
            option = None
        # Of `service install --`, what follows are a node's options again.
        elif argument == "--" and shown[:2] != ["service", "install"]:
            return [*shown, *given[number:]], secrets
        elif name in VARIABLES and equals:
            shown.append(f"{name}={moved(name, value)}")
        else:
            shown.append(argument)
            option = argument if argument in VARIABLES else None
    return shown, secrets


def _is_elsewhere(option: str, value: str) -> bool:
    """Whether an option says where its secret is. An empty one says nothing, and is refused later."""
    return value in ("", "-", f"${VARIABLES[option]}") or value.startswith("@")


def read(option: str, given: str | None) -> str | None:
    """The secret of an option, from wherever it is.

    Its variable is dropped: programs that this one starts have no use for it.
    """
    variable = os.environ.pop(VARIABLES[option], None) or None
    if given == "-":
        return _line(_standard_input(option), f"{option} -: standard input")
    if given is not None and given.startswith("@"):
        return _line(_file(option, Path(given[1:]).expanduser()), f"{option} {given}: the file")
    named = f"${VARIABLES[option]}"
    if given == named and variable is None:
        raise UsageError(f"{option} {named}: the variable is not set, or empty")
    return variable if given in (None, named) else given


def _line(data: bytes, source: str) -> str:
    text = data.decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{source} is empty")
    if len(lines) > 1 or len(data) > _LIMIT_BYTES:
        raise UsageError(f"{source} holds more than one line")
    return lines[0]


def _file(option: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{option} @{path}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"{option} @{path}: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & 0o044:
        click.echo(f"Warning: {path} can be read by other users of this machine (chmod 600 {path})", err=True)
    return data


def _standard_input(option: str) -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            f"{option} - reads standard input, which is a terminal",
            hint=f"pipe it in, or name a file: {option} @FILE",
        )
    descriptor, data = sys.stdin.fileno(), b""
    deadline = time.monotonic() + _STDIN_S
    while len(data) <= _LIMIT_BYTES:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise UsageError(f"{option} -: standard input did not end within {_STDIN_S:.0f} s")
        chunk = os.read(descriptor, _LIMIT_BYTES)
        if not chunk:
            break
        data += chunk
    return data
