"""Whether an engine that runs still answers.

Its HTTP threads do so while it computes, whatever that takes. One that was
stopped, or whose threads wait for each other, keeps its port and its
connections: only silence gives it away.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

from mesh_llm.tasks import cancelled

BEAT_S = 1.0
"""Between two questions: each takes a tenth of a millisecond, of an engine busy or idle."""
SILENCE_S = 6.0
"""Without an answer: an engine that swaps, or waits for its turn on a crowded machine, comes back sooner."""

_QUESTION = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
_PIECE_S = 1.0
_RETRY_S = 0.1


async def until_heard(port: int) -> None:
    """Returns once the engine on `port` has answered. How long that may take is its caller's to say."""
    await _answer(port)


async def until_silent(port: int) -> None:
    """Asks the engine on `port` now and then; returns once it has not answered for `SILENCE_S`."""
    while True:
        await asyncio.sleep(BEAT_S)
        answer = asyncio.create_task(_answer(port), name=f"beat of the engine on {port}")
        try:
            if not await _comes(answer):
                return
        finally:
            await cancelled(answer)


async def _comes(answer: asyncio.Task[None]) -> bool:
    # In pieces: of a nap, this node's own or the whole machine's, one at most counts.
    for _ in range(round(SILENCE_S / _PIECE_S)):
        await asyncio.wait((answer,), timeout=_PIECE_S)
        if answer.done():
            answer.result()
            return True
    return False


async def _answer(port: int) -> None:
    """Any answer will do. Waits for it without a bound: that is its owner's."""
    while True:
        try:
            # A connection each time: one that is kept open wakes the engine a hundred times a second.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(writer):
                writer.write(_QUESTION)
                if await reader.read(1):
                    return
        except ConnectionError:
            pass  # it does not listen, or has just been ended, which shows elsewhere
        except OSError:
            return  # this node is short of something: no word about the engine
        await asyncio.sleep(_RETRY_S)
