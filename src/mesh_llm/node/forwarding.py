"""Streams of two members that reach each other only through this node."""

from __future__ import annotations

from mesh_llm.tasks import task_group
from mesh_llm.transport.network import Stream

_PIECE_BYTES = 1 << 16


async def join_streams(stream: Stream, onward: Stream) -> None:
    """Copy both ways until both have ended; where one breaks, the other is reset."""
    try:
        async with task_group() as group:
            group.create_task(_pump(stream, onward), name="forward")
            group.create_task(_pump(onward, stream), name="forward back")
    except BaseException:
        # Merely let go of, it would look as if it had ended well. The first is its server's to reset.
        onward.reset()
        raise


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.read(_PIECE_BYTES):
        await target.write(data)
    await target.finish()
