"""`mesh-llm relay` as a person types it."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.support.command import Running, mesh_llm, start

TOKEN = "hush-hush"
LOCAL = ("relay", "--listen", "127.0.0.1:0")


def url_of(running: Running) -> str:
    running.until_said("Nodes use it with")
    found = re.search(r"Relay: (http://127\.0\.0\.1:\d+)\n", running.stdout)
    assert found is not None, running.stdout
    return found[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_it_runs_until_it_is_told_to_stop(number: signal.Signals, status: int) -> None:
    with start(*LOCAL) as running:
        url = url_of(running)
        assert running.stdout == f"Relay: {url}\nNodes use it with: mesh-llm --relay {url}\n"
        assert get(f"{url}/health") == '{"status": "ok"}'
        running.signal(number)
        ended = running.wait()

    assert (ended.status, ended.stderr) == (status, "Stopping\n")


def test_under_nohup_it_outlives_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start(*LOCAL) as running:
            url = url_of(running)
            running.signal(signal.SIGHUP)
            assert get(f"{url}/health") == '{"status": "ok"}'
            running.signal(signal.SIGTERM)
            ended = running.wait()
    finally:
        signal.signal(signal.SIGHUP, before)

    assert (ended.status, ended.stderr) == (0, "Stopping\n")


def test_a_token_from_the_environment_is_never_shown() -> None:
    env = {"MESH_LLM_RELAY_TOKEN": TOKEN}
    with start(*LOCAL, "--metrics", "--debug", env=env) as running:
        url = url_of(running)
        assert f"Nodes use it with: MESH_LLM_RELAY_TOKEN=… mesh-llm --relay {url}\n" in running.stdout
        assert "mesh_relay_clients 0.0" in get(f"{url}/metrics")
        assert TOKEN not in " ".join(running.process.args)  # type: ignore[arg-type]
        running.signal(signal.SIGTERM)
        ended = running.wait()

    assert TOKEN not in ended.stdout + ended.stderr


def test_json() -> None:
    with start(*LOCAL, "--log-format", "json") as running:
        running.until_said('"use"')
        running.signal(signal.SIGTERM)
        lines = [json.loads(line) for line in running.wait().stdout.splitlines()]

    assert [line["event"] for line in lines] == ["relay", "use"]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = mesh_llm("relay", "--listen", f"127.0.0.1:{port}")

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: port {port} is in use")
    assert ended.stderr.endswith("Hint: --listen ADDR:0 takes any free port\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:0"], "a relay on 0.0.0.0 would serve anybody"),
        (["--listen", "nonsense:x"], "--listen nonsense:x is not ADDR:PORT"),
        (["--allow", "nobody"], "--allow nobody is not a node's id"),
        (["--token", "two words"], "a relay's token has 1 to 255 letters, digits and signs, no spaces"),
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--rate", "fast"], "'fast' is not a size"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    ended = mesh_llm("relay", *arguments)

    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: {message}\n")


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    ended = mesh_llm(*LOCAL, "--tls-cert", tmp_path / "cert.pem")

    assert ended.status == 1
    assert "No such file or directory" in ended.stderr
