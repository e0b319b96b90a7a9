"""Delay lines: a link that takes time, on one machine.

Each chunk is stamped when it arrives and released, in order, when its time has
come; chunks behind it do not wait for each other, as on a real wire. A child
process of its own runs the lines, so that the threads that keep time share
Python with nobody.

    async with delay_lines([Line(one, other, delay_s=0.010)]) as lines:
        ...
    print(lines.report())      # the delay that chunks really had
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from mesh_llm.engine.process import module, spawn

_CHUNK_BYTES = 1 << 18
_SPIN_S = 0.0002
"""The last stretch is spent looking at the clock: a sleep wakes up some 100 µs late."""
_LATENESS_KEPT = 4096
_REPORT_S = 10.0
"""For the child to report and end; it needs milliseconds."""
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Two ends that are joined with a delay; the line owns both from here on."""

    one: socket.socket
    other: socket.socket
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What chunks in one direction really experienced."""

    chunks: int
    size_bytes: int
    median_ms: float
    worst_ms: float


class _Direction:
    """Reads one end, writes the other, later."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._arrived = threading.Condition()
        self._delays: deque[float] = deque(maxlen=_LATENESS_KEPT)
        self._chunks = 0
        self._bytes = 0

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._release)]
        for thread in threads:
            thread.start()
        return threads

    def _read(self) -> None:
        with suppress(OSError):
            while chunk := self._source.recv(_CHUNK_BYTES):
                self._put(chunk)
        self._put(b"")

    def _put(self, chunk: bytes) -> None:
        with self._arrived:
            self._waiting.append((time.perf_counter(), chunk))
            self._arrived.notify()

    def _release(self) -> None:
        _no_timer_slack()
        with suppress(OSError):
            while True:
                with self._arrived:
                    while not self._waiting:
                        self._arrived.wait()
                    stamp, chunk = self._waiting.popleft()
                _wait_until(stamp + self._delay_s)
                if not chunk:
                    break
                # Counted before it is sent: who has received it may ask for the report at once.
                self._delays.append(time.perf_counter() - stamp)
                self._chunks += 1
                self._bytes += len(chunk)
                self._target.sendall(chunk)
        # The end of a link takes as long to be noticed as anything else on it.
        for end in (self._source, self._target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def passage(self) -> Passage:
        delays = [1000 * delay for delay in self._delays] or [0.0]
        return Passage(
            chunks=self._chunks,
            size_bytes=self._bytes,
            median_ms=statistics.median(delays),
            worst_ms=max(delays),
        )


def _wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < moment:
        pass


def _no_timer_slack() -> None:
    """Linux rounds a thread's sleeps up by 50 µs unless told not to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Lines:
    """Running lines. `passages` is filled when they have ended."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []

    def report(self) -> str:
        busy = [passage for passage in self.passages if passage.chunks]
        return ", ".join(
            f"{passage.median_ms:.2f} ms (worst {passage.worst_ms:.2f}) × {passage.chunks}"
            for passage in busy
        )


@asynccontextmanager
async def delay_lines(lines: Sequence[Line]) -> AsyncIterator[Lines]:
    """Join the ends of each line for the length of the block."""
    running = Lines()

    def on_report(text: str) -> None:
        running.passages.append(Passage(**json.loads(text)))

    request = [
        {"one": line.one.fileno(), "other": line.other.fileno(), "delay_s": line.delay_s} for line in lines
    ]
    ends = [end for line in lines for end in (line.one, line.other)]
    try:
        async with spawn(
            module("mesh_llm.lab.delay"),
            on_stdout=on_report,
            on_stderr=lambda text: None,
            pass_fds=[end.fileno() for end in ends],
        ) as child:
            await child.send(json.dumps(request).encode() + b"\n", close=False)
            for end in ends:
                end.close()
            yield running
            # The end of its input asks the child for its report.
            await child.send(b"", close=True)
            async with asyncio.timeout(_REPORT_S):
                await child.wait()
    finally:
        for end in ends:
            end.close()


def main() -> None:
    directions = []
    for line in json.loads(sys.stdin.readline()):
        one, other = socket.socket(fileno=line["one"]), socket.socket(fileno=line["other"])
        for source, target in ((one, other), (other, one)):
            directions.append(_Direction(source, target, line["delay_s"]))
    for direction in directions:
        direction.start()
    sys.stdin.read()
    for direction in directions:
        passage = direction.passage()
        print(json.dumps({name: getattr(passage, name) for name in Passage.__slots__}))


if __name__ == "__main__":
    main()
