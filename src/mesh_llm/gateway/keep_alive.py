"""Signs of life for a client that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beating(every_s: float, sent: Callable[[], int], on_quiet: Callable[[], None]) -> Iterator[None]:
    """Within the block, call `on_quiet` after each `every_s` in which `sent` has stayed the same.

    Whatever the request waits for meanwhile: who waits need not think of it. It asks instead of being
    told, since a token must cost nothing here; so the client hears something after twice `every_s` at
    the latest.
    """
    loop = asyncio.get_running_loop()
    before = sent()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal before, timer
        if sent() == before:
            on_quiet()
        before = sent()
        timer = loop.call_later(every_s, look)

    timer = loop.call_later(every_s, look)
    try:
        yield
    finally:
        timer.cancel()
