"""packaging/Containerfile names options, commands and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from mesh_llm.bundle.build import INSTALL
from mesh_llm.cli.main import command_group
from tests.support import containerfile

TEXT = (Path(__file__).parents[2] / "packaging" / "Containerfile").read_text("utf-8")
STAGES = containerfile.parse(TEXT)


@pytest.mark.parametrize("target", ["node", "node-cuda", "relay"])
def test_its_commands_and_options_exist(target: str) -> None:
    program, *arguments = containerfile.entry_point(STAGES, target)
    assert program == "mesh-llm"
    group = command_group()
    context = click.Context(group)
    command: click.Command = group
    if not arguments[0].startswith("-"):
        found = group.get_command(context, arguments[0])
        assert found is not None
        command = found
    known = {option for parameter in command.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known
    check = containerfile.health_check(STAGES, target)
    assert check[0] == "python" or group.get_command(context, check[1]) is not None


def test_what_it_runs_and_copies_is_there() -> None:
    script = INSTALL.read_text()
    steps = [(step, rest) for stage in STAGES.values() for step, rest in stage.steps]
    installs = [rest for step, rest in steps if step == "RUN" and "install.sh" in rest]
    assert len(installs) == 3
    for option in {option for rest in installs for option in re.findall(r"--\w+", rest)}:
        assert f"        {option})" in script
    sources = {rest.split()[0].removeprefix("--from=") for step, rest in steps if step == "COPY"}
    assert sources <= STAGES.keys()


@pytest.mark.parametrize("target", ["node", "node-cuda", "relay"])
def test_no_image_runs_as_root(target: str) -> None:
    (user,) = containerfile.settings(STAGES, target, "USER")
    made = " ".join(containerfile.settings(STAGES, target, "RUN"))
    assert user == "10001:10001"
    assert "useradd --uid 10001 " in made
    for volume in containerfile.settings(STAGES, target, "VOLUME"):
        for path in re.findall(r'"(.*?)"', volume):
            assert re.search(rf"chown {user} [^&]*{path}\b", made)
