"""The streams that arrive on one connection, before and after its other end is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.framing import FrameError
from mesh_llm.transport.iroh_library import iroh


class StreamGate:
    """Shut: only the first stream, the handshake's, gets through, and any other ends the connection.

    Held: the other side may have been told that it is in before we were, so its streams wait; QUIC bounds
    how many. Open: they go to `deliver`. One task accepts all along, since a call to accept that is
    cancelled may take a stream with it.
    """

    def __init__(self, connection: Any, *, shut: bool) -> None:
        self._connection = connection
        self._first: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wants_first = shut
        self._shut = shut
        self._held: list[Any] = []
        self._deliver: Callable[[Any], None] | None = None
        self._misused: Callable[[], object] = lambda: close(connection, Code.MALFORMED)

    async def first(self) -> Any:
        stream = await self._first
        if stream is None:
            raise FrameError("no stream at all")
        return stream

    def hold(self) -> None:
        self._shut = False

    def open(self, *, deliver: Callable[[Any], None], misused: Callable[[], object]) -> None:
        self._shut = False
        self._deliver = deliver
        self._misused = misused
        held, self._held = self._held, []
        for stream in held:
            deliver(stream)

    async def run(self) -> None:
        """Until the connection ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._accept(), name="accept streams")
                tasks.create_task(self._refuse_one_way(), name="refuse one-way streams")
        finally:
            if not self._first.done():
                self._first.set_result(None)

    async def _accept(self) -> None:
        with suppress(iroh().IrohError):
            while True:
                self._arrived(await self._connection.accept_bi())

    def _arrived(self, stream: Any) -> None:
        if self._wants_first:
            self._wants_first = False
            if not self._first.done():
                self._first.set_result(stream)
        elif self._shut:
            self._misused()
        elif self._deliver is None:
            self._held.append(stream)
        else:
            self._deliver(stream)

    async def _refuse_one_way(self) -> None:
        with suppress(iroh().IrohError):
            await self._connection.accept_uni()
            self._misused()
