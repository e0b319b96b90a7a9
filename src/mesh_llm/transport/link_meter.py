"""Measures a link: one end asks, the other sends back or takes in what it is sent.

    request   what (1 byte), size (4 bytes), count (4 bytes)
    ECHO      `count` messages of `size` bytes follow; each is answered by as many bytes
    SINK      the same; one byte comes back when all have arrived

Both ends are blocking sockets, each in a thread: what is measured is the link, not an event loop.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from mesh_llm.errors import LinkFailed

MESSAGE_LIMIT_BYTES = 16 << 20
"""Of one message: the other end holds it in memory."""
LINK_METER_BYTES = 4 << 30
LINK_METER_S = 30.0
"""What one link may carry, and how long it may take: a measurement takes a quarter of both."""
_LOOK_S = 1
"""Between two looks at the clock of one who waits."""
_REQUEST = struct.Struct("!BII")
_ECHO, _SINK = 1, 2
_ARRIVED = b"!"


class LinkMeter:
    """The end that asks. It owns the link until it is closed."""

    def __init__(self, link: socket.socket, *, within_s: float = LINK_METER_S) -> None:
        self._link = link
        self._end = _End(link, within_s)
        self._buffer = memoryview(bytearray(MESSAGE_LIMIT_BYTES))

    def __enter__(self) -> LinkMeter:
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that still waits for it is woken up first: closing alone would not.
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def round_trips(self, size: int, count: int) -> list[float]:
        """Seconds of each: a message of that size there, and one as large back."""
        seconds = []
        message = self._buffer[:size]
        self._end.send(_REQUEST.pack(_ECHO, size, count))
        for _ in range(count):
            start = time.perf_counter()
            self._end.send(message)
            self._end.receive(message)
            seconds.append(time.perf_counter() - start)
        return seconds

    def bytes_s(self, size: int, count: int) -> float:
        """So many messages one way, one behind the other, until all have arrived."""
        self._end.send(_REQUEST.pack(_SINK, size, count))
        start = time.perf_counter()
        for _ in range(count):
            self._end.send(self._buffer[:size])
        self._end.receive(self._buffer[:1])
        return size * count / (time.perf_counter() - start)


def answer(
    link: socket.socket, *, limit_bytes: int = LINK_METER_BYTES, within_s: float = LINK_METER_S
) -> None:
    """The other end: until the link ends, or has carried or taken as much as one may. Closes it."""
    with link, suppress(LinkFailed, OSError):
        end = _End(link, within_s)
        head, buffer = memoryview(bytearray(_REQUEST.size)), memoryview(b"")
        while True:
            end.receive(head)
            what, size, count = _REQUEST.unpack(head)
            limit_bytes -= size * count
            if what not in (_ECHO, _SINK) or not 1 <= size <= MESSAGE_LIMIT_BYTES or limit_bytes < 0:
                return
            if len(buffer) < size:
                buffer = memoryview(bytearray(size))
            for _ in range(count):
                end.receive(buffer[:size])
                if what == _ECHO:
                    end.send(buffer[:size])
            if what == _SINK:
                end.send(_ARRIVED)


class _End:
    """Sends and receives whole messages until its time is up, however slowly the other end does."""

    def __init__(self, link: socket.socket, within_s: float) -> None:
        self._link = link
        self._within_s = within_s
        self._deadline = time.monotonic() + within_s
        link.setblocking(True)
        # In the kernel: a time-out of Python's own costs a call of the system for each message.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _LOOK_S, 0))

    def send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._check()
            with suppress(BlockingIOError):
                left = left[self._link.send(left) :]

    def receive(self, into: memoryview) -> None:
        while into:
            self._check()
            with suppress(BlockingIOError):
                count = self._link.recv_into(into)
                if not count:
                    raise LinkFailed("the link ended while it was measured")
                into = into[count:]

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise LinkFailed(f"a measurement took more than {self._within_s:.0f} s")
