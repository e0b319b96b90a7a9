"""`mesh-llm logs`: the end of the logs, and what is added to them."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_llm.cli.output import set_up_logging
from tests.support.command import mesh_llm, start


def write(home: Path, name: str, *lines: str) -> None:
    (home / "logs").mkdir(exist_ok=True)
    with (home / "logs" / name).open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_the_end_of_the_logs(home: Path) -> None:
    write(home, "node.log.1", "a", "b")
    write(home, "node.log", "c")
    write(home, "engine.log", *"123", "\x1b[31mred")
    write(home, "access.log", "GET /")

    ended = mesh_llm("logs", "-n", "2", "--home", home)
    requests = mesh_llm("logs", "access", "--home", home)
    as_json = mesh_llm("logs", "node", "--json", "--home", home)

    assert (ended.status, ended.stderr) == (0, "")
    assert ended.stdout == "==> node <==\nb\nc\n==> engine <==\n3\n?[31mred\n"
    assert requests.stdout == "GET /\n"
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == [
        {"log": "node", "line": line} for line in "abc"
    ]


def test_logs_of_a_node_are_private(home: Path) -> None:
    set_up = "from pathlib import Path; from mesh_llm.cli.output import set_up_logging as log; import sys"
    code = f"{set_up}; log(Path(sys.argv[1], 'node.log'), debug=False, log_format='text')"
    subprocess.run([sys.executable, "-c", code, home], check=True)

    modes = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    assert modes == {"node.log": 0o600, "access.log": 0o600}


@pytest.mark.parametrize("is_empty", [False, True])
def test_no_log_yet(home: Path, *, is_empty: bool) -> None:
    if is_empty:
        (home / "logs").mkdir()
        (home / "logs" / "node.log").touch()

    ended = mesh_llm("logs", "--home", home)

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: there is no log in {home / 'logs'}\nHint: ")


def test_a_log_that_is_not_kept() -> None:
    assert mesh_llm("logs", "kitchen").status == 2


def test_following_through_a_rotation(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the very handler that a node writes its log with."""
    (home / "logs").mkdir()
    root = logging.getLogger()
    before = list(root.handlers), root.level
    access = logging.getLogger("mesh_llm.access")
    monkeypatch.setattr("mesh_llm.cli.output.NODE_LOG_BYTES", 2000)
    monkeypatch.setattr(access, "handlers", [])
    monkeypatch.setattr(access, "propagate", True)
    root.handlers = []
    try:
        set_up_logging(home / "logs" / "node.log", debug=False, log_format="text")
        logging.info("the first")
        with start("logs", "node", "-f", "--home", home) as running:
            running.until_said("the first")
            for number in range(60):
                # More than fits into the file: each is seen before it is two rotations away.
                logging.info("line %d of many", number)
                if number % 10 == 9:
                    running.until_said(f"line {number} of many\n")
            running.signal(signal.SIGINT)
            ended = running.wait()
    finally:
        for handler in (*root.handlers, *access.handlers):
            handler.close()
        root.handlers, root.level = before

    assert (home / "logs" / "node.log.1").exists()
    shown = [line.split("INFO root ")[1] for line in ended.stdout.splitlines()]
    assert shown == ["the first", *(f"line {number} of many" for number in range(60))]
    assert (ended.status, ended.stderr.strip()) == (130, "")
