"""Secrets that a node is given: no other user of the machine sees them, and no program that it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.command import ALONE, MESH_LLM, QUIET, Running, mesh_llm, start
from tests.support.joining import Lab, lab, refused, write_model

KEY = "a-key-that-nobody-else-may-see"
RELAY_TOKEN = "a-relay-token-that-nobody-else-may-see"


@pytest.fixture
def nodes(libraries: dict[str, Path], tmp_path: Path) -> Iterator[Lab]:
    with lab(write_model(tmp_path / "models")) as nodes:
        yield nodes


def environments(running: Running) -> str:
    """Of all programs that it started."""
    found = []
    for process in running.descendants():
        with suppress(psutil.Error):
            found.append(str(process.environ()))
    return "\n".join(found)


def until_hidden(text: str, running: Running) -> None:
    running.until(
        lambda: (shown := str(running.command_lines())) != "{}" and text not in shown, what="it is hidden"
    )


def test_secrets_are_on_no_command_line_and_in_no_childs_environment(nodes: Lab) -> None:
    one = nodes.create("one", f"--api-key={KEY}", env={"MESH_LLM_RELAY_TOKEN": RELAY_TOKEN})
    token = one.token()
    two = nodes.start("two", "--join", token, "--api-key", KEY)
    three = nodes.start("three", token, program=(*MESH_LLM, "join"))
    for node in (two, three):
        until_hidden(token, node)
        node.until_ready()

    assert one.descendants()
    for node in (one, two, three):
        for text in (token, KEY, RELAY_TOKEN):
            assert text not in str(node.command_lines())
            assert text not in environments(node)
    assert "--join $MESH_LLM_JOIN" in " ".join(psutil.Process(two.pid).cmdline())
    assert "$MESH_LLM_JOIN" in psutil.Process(three.pid).cmdline()
    three.until_nodes("one", "three", "two")


def test_a_relay_hides_its_token() -> None:
    with start("relay", "--listen", "127.0.0.1:0", "--token", RELAY_TOKEN) as running:
        running.until_said("MESH_LLM_RELAY_TOKEN=")
        assert RELAY_TOKEN not in str(running.command_lines())


def test_a_token_by_variable_or_file(tmp_path: Path) -> None:
    """Which is not one: it has been read."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("hello\n")
    options = ("--home", tmp_path / "home", "--port", "0")

    assert refused(mesh_llm(*options, env={"MESH_LLM_JOIN": "hello"})) == "this is not an invite token"
    assert refused(mesh_llm(*options, "--join", f"@{file}")) == "this is not an invite token"


def with_input(folder: Path, *arguments: str, stdin: int | None = None, text: str | None = None) -> str:
    """What `mesh-llm ARGUMENTS` says first."""
    inherited = {name: value for name, value in os.environ.items() if name not in QUIET}
    ended = subprocess.run(
        [*MESH_LLM, "--home", folder / "home", "--port", "0", *arguments],
        **({"input": text} if stdin is None else {"stdin": stdin}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**inherited, **ALONE},
    )
    return str(ended.stderr).splitlines()[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n", "Error: this is not an invite token"),
        ("", "Error: --join -: standard input is empty"),
        ("one\ntwo\n", "Error: --join -: standard input holds more than one line"),
    ],
)
def test_a_token_by_standard_input(tmp_path: Path, text: str, said: str) -> None:
    assert with_input(tmp_path, "--join", "-", text=text) == said


def test_a_terminal_is_no_place_for_a_token(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        said = with_input(tmp_path, "--join", "-", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)

    assert said == "Error: --join - reads standard input, which is a terminal"


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    said = with_input(tmp_path, "--join", "-", "--api-key", "-", text="one")

    assert said == "Error: --join - and --api-key - cannot both read standard input"


def test_options_in_the_wrong_place_are_refused_as_before() -> None:
    stands = mesh_llm("--join", "hello", "status")
    unknown = mesh_llm("status", "--join", "hello")

    assert refused(stands, status=2) == "--join comes before status; options go after the command"
    assert "No such option" in refused(unknown, status=2)
