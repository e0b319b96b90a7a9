"""Join a socket, whose other end a native child holds, to a stream of iroh's.

    report = await splice(link, send, recv)

Bytes go both ways until both sides have said that they have no more. The end of
one direction is passed on by itself; a fault, or being cancelled, ends both and
is told to the peer as a reset, so that half an answer never looks like a whole
one. Nothing is read before what was read last has been taken by the other side:
a reader that sleeps stops its writer.

The copying is done by `NativeSplicer` where there is one, by asyncio otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from enum import StrEnum
from typing import Protocol

from iroh.iroh_ffi import IrohError, RecvStream, SendStream

from mesh_llm.frozen import frozen
from mesh_llm.tasks import uninterrupted

SPLICE_CHUNK_BYTES = 256 << 10
"""The most that is copied at once: about what a unix socket holds. Each direction buffers no more."""
SPLICE_FIRST_READ_BYTES = 16 << 10
"""Of a stream: iroh clears what it is asked for, whatever arrives. Reads that came back full ask for more."""
SPLICE_ABANDON_S = 1.0
"""To tell the other side that a stream was given up; it is told by the end of the connection otherwise."""


_RESET_CODE = 1
"""The stream was given up; the peer has no use for the difference between reasons."""


class SpliceEnd(StrEnum):
    FINISHED = "finished"
    """Both sides had no more to send."""
    LINK_LOST = "link lost"
    """The socket broke: the child behind it is gone."""
    STREAM_LOST = "stream lost"
    """The peer gave the stream up, or its connection is gone."""


@frozen
class SpliceReport:
    """What a splice has copied, and why it ended."""

    sent_bytes: int
    """From the socket, taken by the stream."""
    received_bytes: int
    """From the stream, taken by the socket."""
    end: SpliceEnd
    reason: str = ""
    """What the system or iroh said, unless it finished."""


class Splicer(Protocol):
    """Copies until the end. Faults are part of its report; it leaves the streams as they are."""

    async def copy(self, link: socket.socket, send: SendStream, recv: RecvStream) -> SpliceReport: ...


async def splice(
    link: socket.socket, send: SendStream, recv: RecvStream, *, splicer: Splicer | None = None
) -> SpliceReport:
    """Copy both ways until the end. Owns all three from here on."""
    finished = False
    try:
        report = await (splicer or LoopSplicer()).copy(link, send, recv)
        finished = report.end is SpliceEnd.FINISHED
        return report
    finally:
        link.close()
        if not finished:
            await uninterrupted(_abandon(send, recv), "splice end")


class LoopSplicer:
    """In the event loop: needs nothing, and waits for whatever else the loop does."""

    async def copy(self, link: socket.socket, send: SendStream, recv: RecvStream) -> SpliceReport:
        link.setblocking(False)
        out, back = _Direction(), _Direction()
        tasks = [
            asyncio.create_task(out.guard(_copy_out(out, link, send)), name="splice out"),
            asyncio.create_task(back.guard(_copy_in(back, link, recv)), name="splice in"),
        ]
        try:
            for next_ended in asyncio.as_completed(tasks):
                fault = await next_ended
                if fault is not None:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await uninterrupted(_ended(tasks), "splice end")
        end, reason = fault or (SpliceEnd.FINISHED, "")
        return SpliceReport(sent_bytes=out.size_bytes, received_bytes=back.size_bytes, end=end, reason=reason)


class _Direction:
    def __init__(self) -> None:
        self.size_bytes = 0

    async def guard(self, copying: Coroutine[None, None, None]) -> tuple[SpliceEnd, str] | None:
        try:
            await copying
        except OSError as error:
            return SpliceEnd.LINK_LOST, error.strerror or str(error)
        except IrohError as error:
            return SpliceEnd.STREAM_LOST, error.message()
        return None


async def _copy_out(count: _Direction, link: socket.socket, send: SendStream) -> None:
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(SPLICE_CHUNK_BYTES))
    while size := await loop.sock_recv_into(link, buffer):
        await send.write_all(bytes(buffer[:size]))
        count.size_bytes += size
    await send.finish()


async def _copy_in(count: _Direction, link: socket.socket, recv: RecvStream) -> None:
    loop = asyncio.get_running_loop()
    limit = SPLICE_FIRST_READ_BYTES
    while data := await recv.read(limit):
        await loop.sock_sendall(link, data)
        count.size_bytes += len(data)
        if len(data) == limit:
            limit = min(2 * limit, SPLICE_CHUNK_BYTES)
        elif len(data) < limit // 4:
            limit = max(limit // 2, SPLICE_FIRST_READ_BYTES)
    # The child may have closed its end by now, and wants no news of this one.
    with suppress(OSError):
        link.shutdown(socket.SHUT_WR)


async def _abandon(send: SendStream, recv: RecvStream) -> None:
    """Tell the peer: a stream that is merely dropped would look like one that ended well."""
    for telling in (send.reset, recv.stop):
        with suppress(IrohError, TimeoutError):
            async with asyncio.timeout(SPLICE_ABANDON_S):
                await telling(_RESET_CODE)


async def _ended(tasks: list[asyncio.Task[tuple[SpliceEnd, str] | None]]) -> None:
    await asyncio.wait(tasks)
