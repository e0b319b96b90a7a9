"""How far the layers of a lease are: on their way to this disk, then into memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mesh_llm.defaults import LEASE_SILENCE_S
from mesh_llm.transport.network import Stream
from mesh_llm.types import Progress

_BEAT_S = LEASE_SILENCE_S / 3
"""Between two signs of life of a worker that fetches its layers: a fetch has bounds of its own."""


class LeaseProgress:
    """Told to the host, and of layers that are loaded to this node's user."""

    def __init__(self, stream: Stream, tell: Callable[[Progress], None]) -> None:
        self._stream = stream
        self._tell = tell
        self._steps: asyncio.Queue[tuple[int, int]] = asyncio.Queue(maxsize=1)
        self._is_fetching = True
        self._loading: Progress | None = None

    def step(self, done: int, total: int) -> None:
        """Bytes; only the latest are told."""
        self._forget()
        self._steps.put_nowait((done, total))

    def load(self) -> None:
        """They are here. What was fetched last must not be told as loaded."""
        self._is_fetching = False
        self._forget()

    def _forget(self) -> None:
        if self._steps.full():
            self._steps.get_nowait()

    async def report(self) -> None:
        """Returns only by failing or being cancelled."""
        done, total = 0, 0
        while True:
            try:
                async with asyncio.timeout(_BEAT_S if self._is_fetching else None):
                    done, total = await self._steps.get()
            except TimeoutError:
                if not self._is_fetching:
                    continue
            document: dict[str, Any] = {"done_bytes": done, "total_bytes": total}
            if self._is_fetching:
                document["fetching"] = True
            else:
                self._loading = Progress(what="Loading layers", done=done, total=total, unit="bytes")
                self._tell(self._loading)
            await self._stream.write_document(document)

    def finish(self) -> None:
        """The last step may have come too late to be told."""
        if self._loading is not None and self._loading.done < self._loading.total:
            self._tell(replace(self._loading, done=self._loading.total))
