"""Threads for what may hang: a dead network disk answers never."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, but the end of the program does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[..., None], outcome: object) -> None:
        if not done.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            told: tuple[Callable[..., None], object] = (done.set_result, work())
        except Exception as error:
            told = (done.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *told)

    threading.Thread(target=run, name="check", daemon=True).start()
    return done
