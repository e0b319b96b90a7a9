"""Task groups whose failures come out as what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first failure itself, not wrapped: errors here are sentences."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def cancelled(task: asyncio.Task[Any]) -> None:
    """End a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait((task,))
