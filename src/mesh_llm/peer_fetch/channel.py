"""What a model file travels over: a stream of bytes that somebody else opened, and a watch on its pace."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from mesh_llm.errors import MeshError

FETCH_LEAST_BYTES = 512 << 10
"""That have to come in FETCH_STALL_S: at half that pace a small model would take days."""


class ByteStream(Protocol):
    """One stream to one peer, both ways. Raises OSError, EOFError or MeshError where it is broken."""

    async def read(self, limit: int) -> bytes:
        """At most `limit` bytes; b"" at the end."""

    async def write(self, data: bytes) -> None:
        """Returns when the stream has room again."""

    async def finish(self) -> None:
        """Nothing more will be written."""


class SourceLost(Exception):
    """A source went away, was too slow or refused; it may do better the next time."""


class SourceWrong(Exception):
    """A source said or sent what no honest one does."""


class Pace:
    """At least so many bytes in every `stall_s` seconds of waiting for them.

    A limit on silence alone would let a peer hold on with a byte every few seconds. What this
    side does in between, such as writing to a slow disk, does not count.
    """

    def __init__(self, *, stall_s: float) -> None:
        self._stall_s = stall_s
        self._waited_s = 0.0
        self._bytes = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._stall_s - self._waited_s)

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def came(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._bytes >= FETCH_LEAST_BYTES:
            self._bytes = 0
            self._waited_s = 0.0


class Inbox:
    """The receiving end of a stream: lines of JSON first, then bytes as they are."""

    def __init__(self, stream: ByteStream, *, stall_s: float) -> None:
        self._stream = stream
        self._held = bytearray()
        self.pace = Pace(stall_s=stall_s)

    async def line(self, limit: int) -> dict[str, Any]:
        """The next line, which has to be a JSON object of at most `limit` bytes."""
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > limit:
                raise SourceWrong("it sent a line that is too long")
            more = await self._more(1 << 16)
            if not more:
                raise SourceLost("it stopped early, in the middle of its answer")
            self._held += more
        text = bytes(self._held[:end])
        del self._held[: end + 1]
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise SourceWrong("it sent something unreadable") from None
        if not isinstance(message, dict):
            raise SourceWrong("it sent something unreadable")
        return message

    async def some(self, limit: int) -> bytes:
        """At most `limit` bytes; b"" at the end."""
        if self._held:
            taken = bytes(self._held[:limit])
            del self._held[:limit]
        else:
            taken = await self._more(limit)
        self.pace.came(len(taken))
        return taken

    async def _more(self, limit: int) -> bytes:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(self.pace.left_s):
                more = await self._stream.read(limit)
        except TimeoutError:
            raise SourceLost("it sends nothing, or hardly anything") from None
        except (OSError, EOFError, MeshError) as error:
            raise SourceLost(f"the connection broke ({error or type(error).__name__})") from error
        self.pace.waited(clock() - began)
        if len(more) > limit:
            raise SourceWrong("it sent more than was asked for")
        return more
