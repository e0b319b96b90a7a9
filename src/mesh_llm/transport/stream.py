"""A stream to another node: bytes both ways, in order, with back-pressure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from typing import Any

from mesh_llm.defaults import STREAM_RESET_S
from mesh_llm.errors import PeerLost
from mesh_llm.transport.framing import LENGTH, FrameError, decode_document, encode_document
from mesh_llm.transport.iroh_library import iroh, message_of

STREAM_HEADER_LIMIT_BYTES = 64 << 10
"""What a stream says about itself first: a request's headers at their worst."""


READ_BYTES = 256 << 10
_CODE = re.compile(r"(?:Reset|Stopped)\((\d+)\)")

Spawn = Callable[[Coroutine[Any, Any, None], str], None]
"""Hands a coroutine to an owner, who awaits it in the end."""


class StreamCode(IntEnum):
    """Application codes of QUIC's stream resets."""

    CANCELLED = 0
    REFUSED = 1
    FAILED = 2


_WORDS = {
    StreamCode.CANCELLED: "the other node cancelled the stream",
    StreamCode.REFUSED: "the other node refused the stream",
    StreamCode.FAILED: "the other node failed at the stream",
}


class Stream:
    """`sending` and `receiving` are iroh's own handles, for those who move bytes without this class.

    One reader and one writer at a time. Each handle carries a lock that a waiting call holds: a reset
    therefore ends what waits before it speaks.
    """

    def __init__(self, pair: Any, spawn: Spawn) -> None:
        self.sending = pair.send()
        self.receiving = pair.recv()
        self._spawn = spawn
        self._waiting: set[asyncio.Future[Any]] = set()
        self._finished = False
        self._reset = False

    async def read(self, limit: int) -> bytes:
        """Some bytes, at most `limit`; b"" at the end."""
        return bytes(await self._wait_for(self.receiving.read(limit)))

    async def read_exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = await self.read(min(count, READ_BYTES))
            if not part:
                raise PeerLost("the stream ended too early")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    async def write(self, data: bytes) -> None:
        """Returns when the other side has room for them."""
        await self._wait_for(self.sending.write_all(data))

    async def finish(self) -> None:
        """No more will be written; what was is delivered."""
        if self._finished or self._reset:
            return
        self._finished = True
        await self._wait_for(self.sending.finish())

    def reset(self, code: StreamCode = StreamCode.CANCELLED) -> None:
        """Give up both directions; reads and writes that wait end with `PeerLost`."""
        if not self._reset:
            self._reset = True
            self._spawn(self._do_reset(code), "reset a stream")

    def was_reset(self) -> bool:
        """By this side."""
        return self._reset

    async def write_document(self, document: dict[str, Any]) -> None:
        text = encode_document(document)
        await self.write(LENGTH.pack(len(text)) + text)

    async def read_document(self, limit_bytes: int = STREAM_HEADER_LIMIT_BYTES) -> dict[str, Any]:
        (length,) = LENGTH.unpack(await self.read_exactly(LENGTH.size))
        if length > limit_bytes:
            self.reset(StreamCode.REFUSED)
            raise PeerLost(f"a document of {length} bytes; the limit is {limit_bytes}")
        try:
            return decode_document(await self.read_exactly(length))
        except FrameError as error:
            self.reset(StreamCode.REFUSED)
            raise PeerLost(f"the other node sent {error}") from None

    async def _wait_for(self, operation: Coroutine[Any, Any, Any]) -> Any:
        if self._reset:
            operation.close()
            raise PeerLost("the stream was reset")
        waiting = asyncio.ensure_future(operation)
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.was_reset() and (current is None or not current.cancelling()):
                raise PeerLost("the stream was reset") from None
            raise
        except iroh().IrohError as error:
            raise PeerLost(_words(message_of(error))) from None
        finally:
            self._waiting.discard(waiting)

    async def _do_reset(self, code: StreamCode) -> None:
        waiting = tuple(self._waiting)
        for operation in waiting:
            operation.cancel()
        if waiting:
            await asyncio.wait(waiting)
        # The sending half first: a stream that is merely let go of looks as if it had ended well.
        for halt in (self.sending.reset, self.receiving.stop):
            with suppress(TimeoutError, iroh().IrohError):
                async with asyncio.timeout(STREAM_RESET_S):
                    await halt(int(code))

    async def leave(self) -> None:
        """The end of whoever served this stream: what it wrote is delivered, what it did not read is not."""
        try:
            await self.finish()
            await self._wait_for(self.receiving.stop(int(StreamCode.CANCELLED)))
        except PeerLost:
            return


def _words(message: str) -> str:
    if match := _CODE.search(message):
        number = int(match[1])
        return _WORDS[StreamCode(number)] if number in _WORDS else "the other node reset the stream"
    if "ConnectionLost" in message or "closed" in message.lower():
        return "the connection to the other node is gone"
    return f"the stream broke: {message}"
