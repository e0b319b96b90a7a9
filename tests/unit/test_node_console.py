"""The picture of a node goes on, whatever happens to it."""

from __future__ import annotations

import asyncio

import pytest

from mesh_llm.console.event_feed import Feed
from mesh_llm.node import node_console
from mesh_llm.node.announcements import Announcements
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event


async def test_one_mistake_does_not_end_the_picture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_console, "CONSOLE_BEAT_S", 0.0)
    again = asyncio.Event()

    async def draw() -> None:
        if caplog.records:
            again.set()
            await asyncio.Event().wait()
        raise KeyError("model")

    drawing = asyncio.create_task(node_console._lasting(draw))
    async with asyncio.timeout(20):
        await again.wait()
    await cancelled(drawing)
    assert [record.message for record in caplog.records] == ["the console's picture failed"]


async def test_what_is_said_is_one_line_whoever_had_a_say_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """An engine's last words may quote what another node sent."""
    caplog.set_level("INFO")
    told: list[Event] = []

    async def status() -> dict[str, str]:
        return {}

    announcements = Announcements(told.append, lambda _: None, Feed(status))
    words = "Engine lost: \x1b[2J\nAPI ready"
    announcements.say("engine", words)
    announcements.tell(Event(kind="engine", text=words))
    announcements.note(Event(kind="failed", text=words))

    clean = "Engine lost: ?[2J?API ready"
    assert [event.text for event in told] == [clean, clean]
    assert [record.message for record in caplog.records] == [f"engine: {clean}", f"failed: {clean}"]
