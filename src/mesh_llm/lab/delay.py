"""Lines: a link that is slow, narrow or lossy, on one machine.

Each chunk is stamped when it arrives and released, in order, when its time has
come; chunks behind it do not wait for each other, as on a real wire. A child
process of its own runs the lines, so that the threads that keep time share
Python with nobody.

    far = Conditions(delay_s=0.010)
    async with delay_lines([Line(one=one, other=other, there=far, back=far)]) as lines:
        ...
        await lines.read()     # what went through so far, by direction
        await lines.set(0, there=Conditions(), back=far)
    print(lines.report())      # the delay that chunks really had

`joined` is a line in threads of this process, for whoever has no more to do
than to wait: a node, while its children talk to each other.

A `DelayDoor` is a line with an address: whoever connects to it is joined to its
target, for programs that make their connections themselves.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.lab.conditions import Conditions, Passage, Way
from mesh_llm.lab.datagrams import DatagramDoor
from mesh_llm.lab.delay_queue import DelayQueue
from mesh_llm.lab.rpc_proxy import RpcSessionReport, RpcTally

_BUFFER_BYTES = 1 << 20
_SLICE_S = 0.001
"""A narrow line takes as much at a time as it sends in this time: its bytes arrive spread out."""
_LEAST_SLICE_BYTES = 1448
_REPORT_S = 10.0
"""For the child to report and end; it needs milliseconds."""
_CONNECT_S = 10.0
"""For the target to take a caller in; it is on this machine, or as near as one that lines are laid to."""
_ACCEPT_PAUSE_S = 0.1
_SWITCH_S = 0.0005
"""A thread whose time has come does not wait for another's turn to end: by default that takes 5 ms."""

OPEN = Conditions()
Address = tuple[str, int] | str
"""Of TCP and UDP, or a unix socket's path."""
Splitter = Callable[[memoryview], Sequence[tuple[memoryview, bool]]]
"""Cuts what arrives into pieces, and says of each whether the line's conditions hold for it."""


@frozen
class Line:
    """Two ends that are joined; the line owns both from here on."""

    one: socket.socket
    other: socket.socket
    there: Conditions = OPEN
    """From `one` to `other`."""
    back: Conditions = OPEN


@frozen
class DelayDoor:
    """A socket to connect or send to, which the line owns from here on, and where that leads."""

    listener: socket.socket
    """Of a stream, listening; or of datagrams."""
    target: Address
    there: Conditions = OPEN
    """To the target."""
    back: Conditions = OPEN
    rpc: bool = False
    """Stock ggml-rpc is spoken here: the conditions hold for commands that compute, and for nothing else."""


class Lines:
    """Running lines.

    `passages` holds what was last read, two for each line (from its one end to
    the other, and back), then two for each door (to its target, and back). It is
    read a last time when the lines end.
    """

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.rpc: list[tuple[RpcSessionReport, ...]] = []
        """For each door, what was done through it, where it knows stock RPC."""
        self._child: Child | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def read(self) -> list[Passage]:
        """What went through until now."""
        await self._ask({})
        return self.passages

    async def set(self, number: int, *, there: Conditions, back: Conditions) -> None:
        """Change a line, or a door: doors are counted after the lines. Holds when it returns."""
        await self._ask({"number": number, "there": asdict(there), "back": asdict(back)})

    async def ended(self) -> None:
        """Returns when the child has ended though nobody asked it to."""
        assert self._child is not None, "these lines are not running"
        await self._child.wait()

    async def _ask(self, request: dict[str, Any]) -> None:
        assert self._child is not None, "these lines are not running"
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.append(arrived)
        try:
            async with asyncio.timeout(_REPORT_S):
                await self._child.send(json.dumps(request).encode() + b"\n", close=False)
                await arrived
        except TimeoutError:
            raise MeshError(f"the lines did not answer within {_REPORT_S:.0f} s") from None

    def report(self) -> str:
        busy = [passage for passage in self.passages if passage.chunks]
        return ", ".join(
            f"{passage.median_ms:.2f} ms (worst {passage.worst_ms:.2f}) × {passage.chunks}"
            for passage in busy
        )

    def _on_report(self, text: str) -> None:
        document = json.loads(text)
        self.passages = [Passage(**fields) for fields in document["passages"]]
        self.rpc = [tuple(map(RpcSessionReport.from_fields, door)) for door in document["rpc"]]
        # Answers come in the order of the questions; the last report answers nobody.
        if self._waiting and not (arrived := self._waiting.pop(0)).done():
            arrived.set_result(None)


@asynccontextmanager
async def delay_lines(
    lines: Sequence[Line], doors: Sequence[DelayDoor] = (), *, seed: int = 0
) -> AsyncIterator[Lines]:
    """Join the ends of each line, and open each door, for the length of the block."""
    running = Lines()
    request = {
        "seed": seed,
        "lines": [
            {"one": line.one.fileno(), "other": line.other.fileno(), **_conditions(line)} for line in lines
        ],
        "doors": [
            {
                "listener": door.listener.fileno(),
                "target": door.target,
                "rpc": door.rpc,
                **_conditions(door),
            }
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
            line_limit_bytes=1 << 20,
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


def _conditions(line: Line | DelayDoor) -> dict[str, Any]:
    return {"there": asdict(line.there), "back": asdict(line.back)}


def joined(link: socket.socket, *, delay_s: float) -> socket.socket:
    """The end of a link that is longer than `link`, which belongs to the line from here on."""
    here, there = socket.socketpair()
    for end in (link, there):
        end.setblocking(True)
    far = Conditions(delay_s=delay_s)
    join(there, link, (Way(far, seed=""), Way(far, seed="")))
    return here


# -- streams -----------------------------------------------------------------------------------------


class _Direction:
    """Reads one end of a stream, and passes on to the other."""

    def __init__(
        self, source: socket.socket, target: socket.socket, way: Way, split: Splitter | None = None
    ) -> None:
        self._source = source
        self._target = target
        self._way = way
        self._split = split
        self._waiting = DelayQueue[memoryview | bytes](way, self._deliver, keep=bytes)

    def start(self) -> list[threading.Thread]:
        reading = threading.Thread(target=self._read, daemon=True)
        reading.start()
        return [reading, self._waiting.thread]

    def _read(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with suppress(OSError):
            while count := self._source.recv_into(buffer, self._slice_bytes()):
                if not self._take(buffer[:count]):
                    break
        self._waiting.end()

    def _slice_bytes(self) -> int:
        bytes_s = self._way.conditions.bytes_s
        if not bytes_s:
            return _BUFFER_BYTES
        return min(_BUFFER_BYTES, max(_LEAST_SLICE_BYTES, int(bytes_s * _SLICE_S)))

    def _take(self, data: memoryview) -> bool:
        if self._split is None:
            return self._waiting.take(data, len(data), late_s=self._way.retransmitting_s(len(data)))
        return all(
            self._waiting.take(
                piece, len(piece), late_s=self._way.retransmitting_s(len(piece)) if slowed else None
            )
            for piece, slowed in self._split(data)
        )

    def _deliver(self, data: memoryview | bytes | None) -> None:
        try:
            if data is None:
                # As TCP: the other direction may still have something to say.
                self._target.shutdown(socket.SHUT_WR)
            else:
                self._target.sendall(data)
        except OSError:
            for end in (self._source, self._target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            raise


def join(
    one: socket.socket,
    other: socket.socket,
    ways: tuple[Way, Way],
    splitters: tuple[Splitter | None, Splitter | None] = (None, None),
) -> None:
    """Both belong to the line from here on, which closes them when both directions have ended."""
    threads = [
        *_Direction(one, other, ways[0], splitters[0]).start(),
        *_Direction(other, one, ways[1], splitters[1]).start(),
    ]

    def close() -> None:
        for thread in threads:
            thread.join()
        one.close()
        other.close()

    threading.Thread(target=close, daemon=True).start()


# -- the child ---------------------------------------------------------------------------------------


class _Running:
    """What the child holds: two ways for each line and door."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._ways: list[Way] = []
        self._tallies: list[RpcTally | None] = []
        seed = request["seed"]
        for line in request["lines"]:
            one, other = (socket.socket(fileno=line[name]) for name in ("one", "other"))
            join(one, other, self._pair(line, seed))
        for door in request["doors"]:
            self._open(door, self._pair(door, seed))

    def _pair(self, fields: dict[str, Any], seed: int) -> tuple[Way, Way]:
        number = len(self._ways)
        there, back = (
            Way(Conditions(**fields[name]), seed=f"{seed} {number + index}")
            for index, name in enumerate(("there", "back"))
        )
        self._ways += there, back
        return there, back

    def _open(self, door: dict[str, Any], ways: tuple[Way, Way]) -> None:
        listener = socket.socket(fileno=door["listener"])
        target = door["target"] if isinstance(door["target"], str) else tuple(door["target"])
        tally = RpcTally() if door["rpc"] else None
        self._tallies.append(tally)
        if listener.type == socket.SOCK_DGRAM:
            DatagramDoor(listener, target, ways).start()
        else:
            answer = partial(_answer, listener, target, ways, tally)
            threading.Thread(target=answer, daemon=True).start()

    def change(self, request: dict[str, Any]) -> None:
        first = 2 * request["number"]
        for way, name in zip(self._ways[first : first + 2], ("there", "back"), strict=True):
            way.conditions = Conditions(**request[name])

    def report(self) -> dict[str, Any]:
        return {
            "passages": [asdict(way.passage()) for way in self._ways],
            "rpc": [tally.to_fields() if tally else [] for tally in self._tallies],
        }


def _answer(listener: socket.socket, target: Address, ways: tuple[Way, Way], tally: RpcTally | None) -> None:
    """Joins every caller to the target, for as long as the listener is open."""
    while listener.fileno() >= 0:
        try:
            caller, _ = listener.accept()
        except OSError:
            # Such as that of a process with too many open files: some will be closed.
            time.sleep(_ACCEPT_PAUSE_S)
            continue
        # A thread for each: a target that does not answer holds up nobody else.
        threading.Thread(target=_lead, args=(caller, target, ways, tally), daemon=True).start()


def _lead(caller: socket.socket, target: Address, ways: tuple[Way, Way], tally: RpcTally | None) -> None:
    try:
        onward = _connected(target)
    except OSError:
        caller.close()
        return
    for end in (caller, onward):
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    session = tally.begin() if tally is not None else None
    join(caller, onward, ways, (session.requests, session.answers) if session else (None, None))


def _connected(target: Address) -> socket.socket:
    if isinstance(target, tuple):
        onward = socket.create_connection(target, _CONNECT_S)
        onward.settimeout(None)
        return onward
    onward = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        onward.settimeout(_CONNECT_S)
        onward.connect(target)
        onward.settimeout(None)
    except OSError:
        onward.close()
        raise
    return onward


def main() -> None:
    sys.setswitchinterval(_SWITCH_S)
    running = _Running(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        if "number" in (request := json.loads(line)):
            running.change(request)
        print(json.dumps(running.report()), flush=True)
    print(json.dumps(running.report()), flush=True)


if __name__ == "__main__":
    main()
