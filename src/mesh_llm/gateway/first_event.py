"""The first event of an answer, where the engine has left it out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class FirstEvent:
    """Holds an answer back until its first event is made: that takes a question to the engine."""

    def __init__(self, first: Coroutine[Any, Any, bytes], send: Callable[[bytes], None]) -> None:
        self._send = send
        self._held: list[bytes] = []
        self._is_open = False
        self._task = asyncio.create_task(self._open(first), name="first event of an answer")

    def send(self, event: bytes) -> None:
        """After the first one."""
        if self._is_open:
            self._send(event)
        else:
            self._held.append(event)

    async def first(self) -> bytes:
        """What was made, and sent."""
        return await self._task

    def give_up(self, first: bytes) -> None:
        """Begin with `first`, unless a better one was sent."""
        if not self._is_open:
            self._task.cancel()
            self._let_go(first)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _open(self, first: Coroutine[Any, Any, bytes]) -> bytes:
        event = await first
        self._let_go(event)
        return event

    def _let_go(self, first: bytes) -> None:
        self._is_open = True
        held, self._held = self._held, []
        for event in (first, *held):
            self._send(event)
