"""What a node says at its terminal, and what only its page and log get."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.node.announcements import NEWS_LINES, Announcements, pi_writer
from mesh_llm.types import Event


class Heard:
    def __init__(self) -> None:
        self.terminal: list[str] = []
        self.page: list[str] = []
        feed: Any = self
        self.announcements = Announcements(self._tell, lambda step: None, feed)

    def _tell(self, event: Event) -> None:
        self.terminal.append(event.text)

    def event(self, event: Event) -> None:
        self.page.append(event.text)


def joins(count: int) -> list[Event]:
    return [Event(kind="arrived", text=f"node {number} is in the mesh") for number in range(count)]


def test_joins_and_losses_are_lines_at_the_terminal() -> None:
    heard = Heard()
    heard.announcements.news([Event(kind="lost", text="mini was lost\x1b[2J")])
    assert heard.terminal == heard.page == ["mini was lost?[2J"]


def test_many_at_once_are_one_line() -> None:
    heard = Heard()
    heard.announcements.news(joins(NEWS_LINES))
    heard.announcements.news(joins(NEWS_LINES + 1))
    assert heard.terminal[:NEWS_LINES] == heard.page[:NEWS_LINES]
    assert heard.terminal[NEWS_LINES:] == ["6 changes in the mesh; mesh-llm status shows who is here"]
    assert len(heard.page) == 2 * NEWS_LINES + 1


def test_a_node_that_stops_tells_of_no_others() -> None:
    heard = Heard()
    heard.announcements.news(joins(2), quietly=True)
    assert (heard.terminal, len(heard.page)) == ([], 2)


def test_the_command_for_pi_works_as_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESH_LLM_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pi_writer(tmp_path) == f"{sys.executable} -m mesh_llm agent pi --write"
    command = tmp_path / "mesh-llm"
    command.touch(mode=0o700)
    assert pi_writer(tmp_path) == "mesh-llm agent pi --write"
    assert pi_writer(tmp_path / "a b") == f"mesh-llm agent pi --write --home '{tmp_path}/a b'"
