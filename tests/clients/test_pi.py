"""pi, the coding agent, with the config that `mesh-llm agent pi --write` has made for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import mesh_llm
from tests.support.installed import FromNpm
from tests.support.node import NodeProcess
from tests.support.pairs import Pair

LOCKED = Path(__file__).parent / "pi"
WITHIN_S = 100.0
OFFLINE = ("--no-tools", "--no-session")


@pytest.fixture(scope="session")
def pi() -> Path:
    client = FromNpm(LOCKED)
    if not client.can_be_installed():
        pytest.skip("npm is missing")
    why_not = client.install()
    assert why_not is None, why_not
    return client.command("pi")


@pytest.fixture
def person(api: NodeProcess, pi: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has pi, and its config from here alone."""
    home = tmp_path / "home"
    home.mkdir()
    written = mesh_llm("agent", "pi", "--write", "--home", api.home, env={"HOME": str(home)})
    assert written.status == 0, written.stderr
    # With 2048 tokens there is never as much left as pi wants to have: it would sum up each answer.
    (home / ".pi/agent/settings.json").write_text('{"compaction": {"enabled": false}}')
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return {
        **environment,
        "HOME": str(home),
        "PI_OFFLINE": "1",
        "PI_TELEMETRY": "0",
        "PI_SKIP_VERSION_CHECK": "1",
        "NODE_OPTIONS": f"--require {LOCKED / 'loopback_only.cjs'}",
        "CALLED_OUT": str(tmp_path / "called-out"),
    }


def ask(pi: Path, person: dict[str, str], api: NodeProcess, *arguments: str) -> str:
    """One prompt; the line begins as the node itself has printed it, for a shell."""
    line = next(line for line in api.stdout.splitlines() if line.startswith("pi:    "))
    more = ("-p", "What is the capital of France?", "--system-prompt", "Answer with one word.")
    done = subprocess.run(
        ["sh", "-c", f"{line.removeprefix('pi:    ')} {shlex.join((*more, *OFFLINE, *arguments))}"],
        env={**person, "PATH": f"{pi.parent}:{person['PATH']}"},
        cwd=person["HOME"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    # That it is small for pi is said, where somebody still has to hear it.
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("The context has ")]
    assert (done.returncode, said) == (0, [])
    assert not Path(person["CALLED_OUT"]).exists(), Path(person["CALLED_OUT"]).read_text()
    return done.stdout


def test_one_prompt(pi: Path, person: dict[str, str], api: NodeProcess, pair: Pair) -> None:
    said = ask(pi, person, api, "--mode", "json")
    events: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    # What was said is what was streamed, and pi knows what it took of the context.
    answer = next(event["message"] for event in events if event["type"] == "turn_end")
    deltas = [event["assistantMessageEvent"] for event in events if event["type"] == "message_update"]
    streamed = "".join(delta.get("delta", "") for delta in deltas if delta["type"] == "text_delta")
    assert (answer["provider"], answer["model"]) == ("mesh", pair.model)
    assert answer["stopReason"] in ("stop", "length"), answer
    assert streamed
    assert answer["content"] == [{"type": "text", "text": streamed}]
    assert answer["usage"]["input"] > 10
    assert answer["usage"]["output"] > 0


def test_the_models_that_pi_knows(pi: Path, person: dict[str, str], pair: Pair) -> None:
    listed = subprocess.run(
        [str(pi), "--list-models", "mesh"],
        env=person,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    rows = [line.split() for line in (listed.stdout + listed.stderr).splitlines()]
    assert ["mesh", pair.model] in [row[:2] for row in rows], rows


@pytest.mark.parametrize(
    ("call", "host"),
    [
        ('fetch("http://198.51.100.1/").catch(() => {})', "198.51.100.1"),
        ('require("net").connect(80, "example.test")', "example.test"),
    ],
)
def test_nothing_that_calls_out_goes_unnoticed(
    pi: Path, person: dict[str, str], call: str, host: str
) -> None:
    program = f"try {{ {call} }} catch {{}}"
    subprocess.run(["node", "-e", program], env=person, check=True, timeout=WITHIN_S)
    assert Path(person["CALLED_OUT"]).read_text().split() == [host]
