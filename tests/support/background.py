"""An event loop on a thread of its own: what runs there goes on while a test waits for processes."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 30.0
"""For anything that happens at once; a busy machine may take its time."""


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, within_s: float = WITHIN_S) -> T:
        """To its end, or TimeoutError."""

        async def bounded() -> T:
            async with asyncio.timeout(within_s):
                return await work

        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result(within_s + WITHIN_S)
        except TimeoutError:
            if future.done():
                raise
            raise AssertionError(f"the background loop hangs:\n{self._where()}") from None

    def _where(self) -> str:
        """What its thread and its tasks are at."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-6:])
        tasks = "\n".join(map(repr, asyncio.all_tasks(self._loop)))
        return f"{stack}\n{tasks}"

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """A plain function, on the loop's thread."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def close(self) -> None:
        self.run(_cancel_all())
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def background() -> Iterator[Background]:
    loop = Background()
    try:
        yield loop
    finally:
        loop.close()
