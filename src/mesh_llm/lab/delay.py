"""Delay lines: a link that takes time, on one machine.

Each chunk is stamped when it arrives and released, in order, when its time has
come; chunks behind it do not wait for each other, as on a real wire. A child
process of its own runs the lines, so that the threads that keep time share
Python with nobody.

    async with delay_lines([Line(one, other, delay_s=0.010)]) as lines:
        ...
        await lines.read()     # what went through so far, by direction
    print(lines.report())      # the delay that chunks really had

`joined` is a line in threads of this process, for whoever has no more to do
than to wait: a node, while its children talk to each other.

A `DelayDoor` is a line with an address: whoever connects to it is joined to its
target, for programs that make their connections themselves.
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
from dataclasses import asdict
from typing import Any

from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.frozen import frozen

_CHUNK_BYTES = 1 << 18
_SPIN_S = 0.0002
"""The last stretch is spent looking at the clock: a sleep wakes up some 100 µs late."""
_LATENESS_KEPT = 4096
_REPORT_S = 10.0
"""For the child to report and end; it needs milliseconds."""
_PR_SET_TIMERSLACK = 29


@frozen
class Line:
    """Two ends that are joined with a delay; the line owns both from here on."""

    one: socket.socket
    other: socket.socket
    delay_s: float


@frozen
class DelayDoor:
    """A listening socket, which the line owns from here on, and where its connections lead to."""

    listener: socket.socket
    target: tuple[str, int]
    delay_s: float


@frozen
class Passage:
    """What chunks in one direction really experienced."""

    chunks: int
    size_bytes: int
    median_ms: float
    worst_ms: float


class _Meter:
    """Counts what goes one way, over however many connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays: deque[float] = deque(maxlen=_LATENESS_KEPT)
        self._chunks = 0
        self._bytes = 0

    def count(self, size_bytes: int, delay_s: float) -> None:
        with self._lock:
            self._delays.append(delay_s)
            self._chunks += 1
            self._bytes += size_bytes

    def passage(self) -> Passage:
        with self._lock:
            delays = [1000 * delay for delay in self._delays] or [0.0]
            return Passage(
                chunks=self._chunks,
                size_bytes=self._bytes,
                median_ms=statistics.median(delays),
                worst_ms=max(delays),
            )


class _Direction:
    """Reads one end, writes the other, later."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, meter: _Meter) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._meter = meter
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._arrived = threading.Condition()

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
                self._meter.count(len(chunk), time.perf_counter() - stamp)
                self._target.sendall(chunk)
        # The end of a link takes as long to be noticed as anything else on it.
        for end in (self._source, self._target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


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
    """Running lines.

    `passages` holds what was last read, two for each line (from its one end to
    the other, and back), then two for each door (to its target, and back). It is
    read a last time when the lines end.
    """

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self._child: Child | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def read(self) -> list[Passage]:
        """What went through until now."""
        assert self._child is not None, "these lines are not running"
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.append(arrived)
        async with asyncio.timeout(_REPORT_S):
            await self._child.send(b"\n", close=False)
            await arrived
        return self.passages

    def report(self) -> str:
        busy = [passage for passage in self.passages if passage.chunks]
        return ", ".join(
            f"{passage.median_ms:.2f} ms (worst {passage.worst_ms:.2f}) × {passage.chunks}"
            for passage in busy
        )

    def _on_report(self, text: str) -> None:
        self.passages = [Passage(**fields) for fields in json.loads(text)]
        for arrived in self._waiting:
            if not arrived.done():
                arrived.set_result(None)
        self._waiting.clear()


@asynccontextmanager
async def delay_lines(lines: Sequence[Line], doors: Sequence[DelayDoor] = ()) -> AsyncIterator[Lines]:
    """Join the ends of each line, and open each door, for the length of the block."""
    running = Lines()
    request = {
        "lines": [
            {"one": line.one.fileno(), "other": line.other.fileno(), "delay_s": line.delay_s}
            for line in lines
        ],
        "doors": [
            {"listener": door.listener.fileno(), "target": door.target, "delay_s": door.delay_s}
            for door in doors
        ],
    }
    ends = [end for line in lines for end in (line.one, line.other)] + [door.listener for door in doors]
    try:
        async with spawn(
            module("mesh_llm.lab.delay"),
            on_stdout=running._on_report,
            on_stderr=lambda text: None,
            pass_fds=[end.fileno() for end in ends],
        ) as child:
            await child.send(json.dumps(request).encode() + b"\n", close=False)
            for end in ends:
                end.close()
            running._child = child
            yield running
            running._child = None
            # The end of its input asks the child for its last report.
            await child.send(b"", close=True)
            async with asyncio.timeout(_REPORT_S):
                await child.wait()
    finally:
        for end in ends:
            end.close()


def main() -> None:
    request = json.loads(sys.stdin.readline())
    meters: list[_Meter] = []
    for line in request["lines"]:
        pair = _Meter(), _Meter()
        meters += pair
        _join(socket.socket(fileno=line["one"]), socket.socket(fileno=line["other"]), line["delay_s"], pair)
    for door in request["doors"]:
        pair = _Meter(), _Meter()
        meters += pair
        threading.Thread(target=_answer_door, args=(door, pair), daemon=True).start()

    def report() -> None:
        passages = [meter.passage() for meter in meters]
        fields = [asdict(passage) for passage in passages]
        print(json.dumps(fields), flush=True)

    for _ in sys.stdin:
        report()
    report()


def _join(
    one: socket.socket, other: socket.socket, delay_s: float, meters: tuple[_Meter, _Meter]
) -> list[threading.Thread]:
    there, back = meters
    return [
        *_Direction(one, other, delay_s, there).start(),
        *_Direction(other, one, delay_s, back).start(),
    ]


def joined(link: socket.socket, *, delay_s: float) -> socket.socket:
    """The end of a link that is longer than `link`, which belongs to the line from here on."""
    here, there = socket.socketpair()
    for end in (link, there):
        end.setblocking(True)
    threads = _join(there, link, delay_s, (_Meter(), _Meter()))
    threading.Thread(target=_close_after, args=(threads, (link, there)), daemon=True).start()
    return here


def _close_after(threads: Sequence[threading.Thread], ends: Sequence[socket.socket]) -> None:
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def _answer_door(door: dict[str, Any], meters: tuple[_Meter, _Meter]) -> None:
    with socket.socket(fileno=door["listener"]) as listener:
        while True:
            caller, _ = listener.accept()
            try:
                target = socket.create_connection(tuple(door["target"]))
            except OSError:
                caller.close()
                continue
            for end in (caller, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _join(caller, target, door["delay_s"], meters)


if __name__ == "__main__":
    main()
