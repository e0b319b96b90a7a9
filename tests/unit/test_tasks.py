"""Steps of an ending: what cuts off one of them leaves the others."""

from __future__ import annotations

import asyncio

import pytest

from mesh_llm.tasks import each_in_turn


async def test_a_step_that_is_cancelled_or_fails_leaves_those_after_it() -> None:
    done: list[str] = []
    hanging = asyncio.Event()

    async def hangs() -> None:
        hanging.set()
        await asyncio.Event().wait()

    async def fails() -> None:
        done.append("fails")
        raise OSError("it failed")

    async def closes() -> None:
        done.append("closes")

    async def ends() -> None:
        await each_in_turn(closes, hangs, closes)

    ending = asyncio.create_task(ends())
    await hanging.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert done == ["closes", "closes"]

    with pytest.raises(OSError, match="it failed"):
        await each_in_turn(fails, closes)
    assert done[2:] == ["fails", "closes"]
