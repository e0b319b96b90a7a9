"""The Justfile has the tasks of the first design, and names commands and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click

from mesh_llm.cli.main import command_group

TEXT = (Path(__file__).parents[2] / "Justfile").read_text("utf-8")
TASKS = [
    "build",
    "download-model",
    "local",
    "test",
    "worker",
    "serve",
    "mesh-worker",
    "mesh-serve",
    "bundle",
    "stop",
]


def test_it_has_every_task() -> None:
    assert re.findall(r"^([a-z][a-z-]*)[^:\n]*:(?!=)", TEXT, re.MULTILINE) == TASKS


def test_its_commands_and_options_exist() -> None:
    lines = re.findall(r"\{\{ mesh \}\}(.*)$", TEXT, re.MULTILINE)
    assert len(lines) == len(TASKS) - 1
    for line in lines:
        words = [word for word in line.split() if not re.fullmatch(r"\{\{|\}\}|\w*options|name", word)]
        command: click.Command = command_group()
        while words and isinstance(command, click.Group) and not words[0].startswith("-"):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
