"""Options from `config.toml` in the home, by the names of their flags: `port = 9400`, `max-memory = "8GB"`.

A flag comes before the environment, and the environment before the file. It is read by the verbs that
take a node's options; the others work whatever stands in it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.options import VARIABLES, home_path, node_parameters
from mesh_llm.cli.secret import VARIABLES as SECRETS
from mesh_llm.errors import UsageError
from mesh_llm.home import Home

PROBLEM = "mesh_llm.config_problem"
"""Of a context of click's: why the file was not used, for the verb that only tells of it."""
_LIMIT_BYTES = 1 << 20
_EXCLUSIVE = (
    {"relay", "no-relay"},
    {"join", "new-mesh"},
    {"tensor-split", "layers"},
    {"no-draft", "draft"},
    {"no-draft", "draft-max"},
)
"""A flag takes the place of what the file says of the other one."""


class Configured(click.Command):
    """A command with options of a node; what the command line leaves out may stand in the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        configure(ctx, args)
        return super().parse_args(ctx, args)


class ConfiguredIfFine(click.Command):
    """The same without the file where that has a mistake."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            configure(ctx, args)
        except UsageError as error:
            ctx.meta[PROBLEM] = error
        return super().parse_args(ctx, args)


def configure(ctx: click.Context, args: Sequence[str]) -> None:
    if ctx.resilient_parsing or {"--help", "-h", "--version"} & set(args):
        return
    found = read(Home(_home(args)).config_file)
    known = node_parameters()
    ctx.default_map = {
        known[key].name: [value] if known[key].multiple and isinstance(value, str) else value
        for key, value in found.items()
        if not _is_set_elsewhere(key, args)
    }


def _home(args: Sequence[str]) -> Path:
    given = None
    for index, argument in enumerate(args):
        if argument == "--home" and index + 1 < len(args):
            given = args[index + 1]
        elif argument.startswith("--home="):
            given = argument.removeprefix("--home=")
    return home_path(Path(given) if given else None)


def _is_set_elsewhere(key: str, args: Sequence[str]) -> bool:
    flags = {argument.partition("=")[0].removeprefix("--") for argument in args}
    if "client" in flags and not _is_clients(key):
        return True
    rivals = set[str]().union(*(pair for pair in _EXCLUSIVE if key in pair)) - {key}
    return bool(os.environ.get(VARIABLES.get(key, ""))) or bool(flags & rivals)


def _is_clients(key: str) -> bool:
    """Of a file for a node; run as a lite client it leaves out what that cannot use."""
    from mesh_llm.config import CLIENTS_OPTIONS

    return key.replace("-", "_") in {*CLIENTS_OPTIONS, "log_format", "plain", "debug"}


def read(path: Path) -> dict[str, Any]:
    """What stands in it, checked; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_LIMIT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    # Here: most homes have no such file.
    import tomllib

    try:
        text = data.decode("utf-8")
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not TOML: {error}", hint='a line is like port = 9400, or name = "attic"'
        ) from None
    for key, value in document.items():
        _check(f"{path}{_line(text, key)}", key, value)
    if mode & 0o044 and (secret := _secret(document)):
        raise UsageError(
            f"{path} holds {secret}, and other users of this machine can read it",
            hint=f"chmod 600 {shlex.quote(str(path))}",
        )
    return {key: _expanded(value) for key, value in document.items()}


def _check(where: str, key: str, value: object) -> None:
    known = node_parameters()
    if key == "home":
        raise UsageError(
            f"{where}: home cannot be set in a file that lies in it", hint="--home, or MESH_LLM_HOME"
        )
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise UsageError(
            f"{where}: there is no option {key}",
            hint=f"did you mean {near[0]}?" if near else "mesh-llm --help lists the options",
        )
    expected = _expected(known[key])
    if not expected.holds(value):
        raise UsageError(f"{where}: {key} must be {expected.text}, not {_shown(value)}")


class _Expected:
    def __init__(self, text: str, kind: type, values: Iterable[str] = ()) -> None:
        self.text = text
        self._kind = kind
        self._values = tuple(values)

    def holds(self, value: object) -> bool:
        if self._kind is list:
            texts = value if isinstance(value, list) else [value]
            return all(isinstance(each, str) for each in texts)
        # True is a number to Python.
        return type(value) is self._kind and (not self._values or value in self._values)


def _expected(option: click.Option) -> _Expected:
    if option.is_flag:
        return _Expected("true or false", bool)
    if option.multiple:
        return _Expected('a text or a list of texts, like ["x", "y"]', list)
    if isinstance(option.type, click.Choice):
        return _Expected(f"one of {', '.join(option.type.choices)}", str, option.type.choices)
    return (
        _Expected("a whole number", int) if option.type is click.INT else _Expected('a text, like "x"', str)
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f'"{value[:40]}"'
        if isinstance(value, str)
        else "a table"
        if isinstance(value, dict)
        else str(value)[:40]
    )


def _line(text: str, key: str) -> str:
    """Where a key of the file stands: its parser does not say."""
    pattern = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((f" line {n}" for n, line in enumerate(text.splitlines(), 1) if pattern.match(line)), "")


def _secret(document: Mapping[str, Any]) -> str | None:
    """The first option with a secret in it; `@FILE` says only where it lies."""
    options = (flag.removeprefix("--") for flag in SECRETS)
    return next((key for key in options if not str(document.get(key, "@")).startswith("@")), None)


def _expanded(value: Any) -> Any:
    """A shell would have done so."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
