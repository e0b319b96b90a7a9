"""The picture of a node goes on, whatever happens to it."""

from __future__ import annotations

import asyncio

import pytest

from mesh_llm.node import window
from mesh_llm.tasks import cancelled


async def test_one_mistake_does_not_end_the_picture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(window, "CONSOLE_BEAT_S", 0.0)
    again = asyncio.Event()

    async def draw() -> None:
        if caplog.records:
            again.set()
            await asyncio.Event().wait()
        raise KeyError("model")

    drawing = asyncio.create_task(window._lasting(draw))
    async with asyncio.timeout(20):
        await again.wait()
    await cancelled(drawing)
    assert [record.message for record in caplog.records] == ["the console's picture failed"]
