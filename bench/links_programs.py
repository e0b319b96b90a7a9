"""A process that `links` starts twice: one end of a bare iroh connection, driven natively.

It is told in lines of JSON what to do next, and answers each with one.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from mesh_llm.lab.quic import accept, connect, loopback_endpoint, ticket_of
from mesh_llm.transport.native_splice import NativeSplicer

PING, ECHO, PUSH, PULL = range(4)
"""As links_driver.cpp numbers them."""


class Driver:
    """links_driver.cpp, built: sends and receives in the thread that calls it, without Python's lock."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def socket(self, fd: int, what: int, size: int, rounds: int) -> list[float]:
        seconds = (ctypes.c_double * (rounds if what == PING else 1))()
        sizes = ctypes.c_uint64(size), ctypes.c_uint64(rounds)
        if self._library.drive_socket(fd, what, *sizes, seconds) != 0:
            raise RuntimeError("a link ended early")
        return list(seconds)

    def stream(self, iroh: Any, handles: tuple[int, int], what: int, size: int, rounds: int) -> list[float]:
        seconds = (ctypes.c_double * (rounds if what == PING else 1))()
        numbers = [ctypes.c_uint64(number) for number in (*handles, size, rounds)]
        if self._library.drive_stream(ctypes.byref(iroh), *numbers[:2], what, *numbers[2:], seconds) != 0:
            raise RuntimeError("a stream ended early")
        return list(seconds)


async def _serve() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    request = json.loads(await reader.readline())
    driver, iroh = Driver(Path(request["driver"])), NativeSplicer(Path(request["library"]))._iroh
    endpoint = await loopback_endpoint()
    if request["ticket"] is None:
        _say(ticket=ticket_of(endpoint))
        stream = await (await accept(endpoint)).accept_bi()
        send, recv = stream.send(), stream.recv()
        await recv.read_exact(1)
    else:
        stream = await (await connect(endpoint, request["ticket"])).open_bi()
        send, recv = stream.send(), stream.recv()
        await send.write_all(b"!")
        _say(joined=True)
    while line := await reader.readline():
        task = json.loads(line)
        before = time.process_time()
        seconds = await asyncio.to_thread(
            driver.stream, iroh, (send._handle, recv._handle), task["what"], task["size"], task["rounds"]
        )
        _say(seconds=seconds, cpu_s=time.process_time() - before)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
