"""What asyncio leaves to be said about tasks: failures as they are, ends that are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first failure itself, not wrapped: errors here are sentences."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


@asynccontextmanager
async def meanwhile(work: Coroutine[None, None, T], name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Work that is done beside a block; what is unfinished at the end of the block is not needed."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        await cancelled(task)


class NotWanted(Exception):
    """Work was given up: nobody wants what it would have brought."""


async def while_wanted(
    work: Coroutine[None, None, T], name: str, *, wake: asyncio.Event, is_wanted: Callable[[], bool]
) -> T:
    """The result of work, which is given up with `NotWanted` as soon as that is so: asked at each `wake`.

    `wake` is set again then, and after work during which it was set: whoever waits for it has something to
    look at.
    """
    is_woken = False
    async with meanwhile(work, name) as task:
        while True:
            async with meanwhile(wake.wait(), f"change during {name}") as woken:
                await asyncio.wait((task, woken), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result = task.result()
                if is_woken:
                    wake.set()
                return result
            wake.clear()
            is_woken = True
            if not is_wanted():
                wake.set()
                raise NotWanted(name)


async def each_in_turn(*steps: Callable[[], Awaitable[None]]) -> None:
    """One after the other, also where one fails or is cancelled; that is raised at the end."""
    async with AsyncExitStack() as stack:
        for step in reversed(steps):
            stack.push_async_callback(step)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """End a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait((task,))


async def uninterrupted(work: Coroutine[None, None, None], name: str) -> None:
    """Finish `work` although its owner is cancelled, even twice, and pass that on afterwards.

    For what must not be left half done: a child that ends, a stream that is reset.
    """
    task = asyncio.create_task(work, name=name)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            interruption = error
    task.result()
    if interruption is not None:
        raise interruption
