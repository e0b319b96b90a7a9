"""Which node a command means."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh_llm.cli import control
from mesh_llm.cli.control import running_home
from mesh_llm.home import Home


@contextmanager
def node_on(home: Path) -> Iterator[None]:
    """As far as anybody can tell who knocks."""
    with Home(home).lock(), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(Home(home).control_socket))
        listening.listen()
        yield


def test_the_demo_is_meant_where_nothing_else_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_LLM_HOME", str(home))
    assert running_home(None).path == home
    with node_on(home / "demo"):
        assert running_home(home).path == home
        assert capsys.readouterr().err == ""
        assert running_home(None).path == home / "demo"
        assert capsys.readouterr().err == (
            f"No node is running on {home}; this is the demo, on {home / 'demo'}\n"
        )
        with node_on(home):
            assert running_home(None).path == home


def test_nodes_on_other_homes_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESH_LLM_HOME", raising=False)
    monkeypatch.setattr(control, "home_path", lambda given: given or home / "usual")
    other = Home(home / "a folder")
    monkeypatch.setattr(control, "demo_home", lambda: home / "demo")
    monkeypatch.setattr(control, "noted_homes", lambda: [other, Home(home / "killed")])
    with node_on(other.path):
        assert control._instead(Home(home / "usual")) == f"these run: --home '{other.path}'"
        assert control._instead(Home(home / "named")) == "start one with mesh-llm, or give its --home"
    assert control._instead(Home(home / "usual")) == "start one with mesh-llm, or give its --home"


def test_who_stops_or_asks_where_only_the_demo_runs_is_told_how(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESH_LLM_HOME", raising=False)
    monkeypatch.setattr(control, "home_path", lambda given: given or home / "usual")
    monkeypatch.setattr(control, "demo_home", lambda: home / "demo")
    with node_on(home / "demo"):
        assert control._instead(Home(home / "usual")) == (
            f"the demo runs: mesh-llm demo stop ends it; --home {home / 'demo'} asks it"
        )
