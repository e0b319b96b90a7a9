"""Tasks: endings whose steps do not hold up each other, and work that is given up."""

from __future__ import annotations

import asyncio

import pytest

from mesh_llm.tasks import NotWanted, each_in_turn, while_wanted


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


@pytest.mark.parametrize("changes", [False, True])
async def test_a_change_during_work_is_left_for_whoever_waits_for_it(changes: bool) -> None:
    wake, asked, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> str:
        await go_on.wait()
        return "done"

    def is_wanted() -> bool:
        asked.set()
        return True

    working = asyncio.create_task(while_wanted(work(), "work", wake=wake, is_wanted=is_wanted))
    if changes:
        wake.set()
        await asyncio.wait_for(asked.wait(), 30)
        assert not wake.is_set()
    go_on.set()

    assert await asyncio.wait_for(working, 30) == "done"
    assert wake.is_set() is changes


async def test_work_that_is_no_longer_wanted_is_given_up_and_the_change_left() -> None:
    wake = asyncio.Event()
    wake.set()

    with pytest.raises(NotWanted):
        await while_wanted(asyncio.Event().wait(), "work", wake=wake, is_wanted=lambda: False)

    assert wake.is_set()
