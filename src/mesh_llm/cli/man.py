"""`mesh-llm man`: the manual page, made of what --help says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click

from mesh_llm import __version__
from mesh_llm.cli.main import command_group
from mesh_llm.cli.options import debug_option
from mesh_llm.home import write_whole

_FILES = (
    ("~/.mesh-llm", "state of a node: key, mesh, logs, config.toml (MESH_LLM_HOME)"),
    ("~/.models", "model files (MESH_LLM_MODELS)"),
    ("~/.cache/mesh-llm", "libraries built for this machine (MESH_LLM_CACHE)"),
)
_ENDINGS = (
    ("0", "done"),
    ("1", "failed, with an error and, where there is one, a hint on stderr"),
    ("2", "wrong usage"),
    ("130", "interrupted"),
)


@click.command()
@click.option("--install", is_flag=True, help="write it where man looks for it, for this user")
@debug_option
def man(install: bool, debug: bool) -> None:
    """Print the manual page; mesh-llm man | man -l - shows it."""
    if not install:
        click.echo(page(), nl=False)
        return
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    file = data / "man" / "man1" / "mesh-llm.1"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole({file: page()})
    click.echo(f"Wrote {file}; man mesh-llm shows it")


def page() -> str:
    return "\n".join(_lines(command_group())) + "\n"


def _lines(group: click.Group) -> Iterator[str]:
    yield f'.TH MESH-LLM 1 "" "mesh-llm {__version__}" "User Commands"'
    yield from (".SH NAME", r"mesh-llm \- pool machines into one OpenAI-compatible endpoint")
    yield from (".SH SYNOPSIS", r".B mesh-llm", _text("[VERB] [OPTIONS]"))
    yield from (".SH DESCRIPTION", *_paragraphs(group.help or ""))
    with group.make_context("mesh-llm", [], resilient_parsing=True) as ctx:
        yield from (".SH OPTIONS", *_options(group, ctx))
        yield ".SH VERBS"
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            # The options of `serve` are those above.
            assert command is not None
            yield from _verb(f"mesh-llm {name}", command, ctx, with_options=name != "serve")
    for title, pairs in (("FILES", _FILES), ("EXIT STATUS", _ENDINGS)):
        yield f".SH {title}"
        for term, text in pairs:
            yield from (".TP", f".B {_text(term)}", _text(text))


def _verb(name: str, command: click.Command, parent: click.Context, *, with_options: bool) -> Iterator[str]:
    with command.make_context(name.split()[-1], [], parent=parent, resilient_parsing=True) as ctx:
        arguments = [word for word in command.collect_usage_pieces(ctx) if word != "[OPTIONS]"]
        yield from (f".SS {_text(' '.join([name, *arguments]))}", *_paragraphs(command.help or ""))
        if with_options:
            yield from _options(command, ctx)
        if isinstance(command, click.Group):
            for each in command.list_commands(ctx):
                below = command.get_command(ctx, each)
                assert below is not None
                yield from _verb(f"{name} {each}", below, ctx, with_options=True)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in record[0]:
            yield from (".TP", f".B {_text(record[0])}", _text(record[1]))


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """As it is: no line may begin with a command, and a hyphen stays one that can be copied."""
    plain = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = "".join(sign if sign.isascii() else rf"\[u{ord(sign):04X}]" for sign in plain)
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
