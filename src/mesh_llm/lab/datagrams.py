"""Datagrams through a line: many with each call of the system, where it has such calls.

A call of the system takes as long for a datagram as sending it does; a line that makes two for each halves
what arrives. On Linux `recvmmsg` reads many at a time, and those of one size from one sender are sent on with
one call, which the kernel takes apart (`UDP_SEGMENT`); what was sent so arrives whole (`UDP_GRO`).
"""

from __future__ import annotations

import ast
import ctypes
import errno
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from mesh_llm.frozen import frozen
from mesh_llm.lab.conditions import Way
from mesh_llm.lab.delay_queue import DelayQueue

_DATAGRAM_LIMIT_BYTES = 1 << 16
_AT_ONCE = 64
_RUN_LIMIT_BYTES = 65_000
_RUN_LIMIT = 64
"""What the kernel takes apart at once."""
_SOCKET_BUFFER_BYTES = 4 << 20
_FLOWS_LIMIT = 64
"""Senders at one door; one more, and the oldest is forgotten."""
_UDP_SEGMENT, _UDP_GRO = 103, 104
_MSG_WAITFORONE = 0x10000
_NAME_BYTES = 28
_CONTROL_BYTES = 32


@frozen
class Run:
    """Datagrams of one size, one after the other; the last may be shorter."""

    data: bytes
    size: int
    sender: bytes
    """Its address as the system writes it; equal for equal senders."""

    def datagrams(self) -> list[bytes]:
        return [self.data[at : at + self.size] for at in range(0, len(self.data), self.size)] or [b""]


def tune(end: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    if sys.platform == "linux":
        with suppress(OSError):
            end.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)


def reader(end: socket.socket) -> Iterator[list[Run]]:
    """What arrives, until the socket ends."""
    return ManyReader(end).runs() if sys.platform == "linux" else _one_by_one(end)


def _one_by_one(end: socket.socket) -> Iterator[list[Run]]:
    while True:
        try:
            data, sender = end.recvfrom(_DATAGRAM_LIMIT_BYTES)
        except ConnectionRefusedError:
            continue
        except OSError:
            return
        yield [Run(data=data, size=len(data) or 1, sender=repr(sender).encode())]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Msghdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Mmsghdr(ctypes.Structure):
    _fields_ = (("header", _Msghdr), ("size", ctypes.c_uint))


_SIZE_AT, _CONTROL_AT = (offset // 4 for offset in (_Mmsghdr.size.offset, _Msghdr.control_size.offset))
_WORDS = ctypes.sizeof(_Mmsghdr) // 4


class ManyReader:
    """Reads as many datagrams as have arrived with one call."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._data = ctypes.create_string_buffer(_AT_ONCE * _DATAGRAM_LIMIT_BYTES)
        self._view = memoryview(self._data)
        self._names = ctypes.create_string_buffer(_AT_ONCE * _NAME_BYTES)
        self._controls = ctypes.create_string_buffer(_AT_ONCE * _CONTROL_BYTES)
        self._iovecs = (_Iovec * _AT_ONCE)()
        self._headers = (_Mmsghdr * _AT_ONCE)()
        for index in range(_AT_ONCE):
            self._prepare(index)
        self._fresh = bytes(self._headers)
        self._words = (ctypes.c_uint32 * (_WORDS * _AT_ONCE)).from_buffer(self._headers)

    def _prepare(self, index: int) -> None:
        iovec, header = self._iovecs[index], self._headers[index].header
        iovec.base = ctypes.addressof(self._data) + index * _DATAGRAM_LIMIT_BYTES
        iovec.size = _DATAGRAM_LIMIT_BYTES
        header.name = ctypes.addressof(self._names) + index * _NAME_BYTES
        header.name_size = _NAME_BYTES
        header.iov, header.iov_count = ctypes.addressof(iovec), 1
        header.control = ctypes.addressof(self._controls) + index * _CONTROL_BYTES
        header.control_size = _CONTROL_BYTES

    def runs(self) -> Iterator[list[Run]]:
        while True:
            count = self._receive(self._end.fileno(), self._headers, _AT_ONCE, _MSG_WAITFORONE, None)
            if count > 0:
                yield self._found(count)
                # The system has written over what it was told.
                ctypes.memmove(self._headers, self._fresh, count * ctypes.sizeof(_Mmsghdr))
            elif ctypes.get_errno() not in (errno.ECONNREFUSED, errno.EINTR):
                return

    def _found(self, count: int) -> list[Run]:
        sizes = self._words[_SIZE_AT : _WORDS * count : _WORDS]
        controls = self._words[_CONTROL_AT : _WORDS * count : _WORDS]
        names = self._names.raw[: count * _NAME_BYTES]
        sender = names[:_NAME_BYTES]
        # Looked at together first: most often they are alike, and each one by itself takes ten times as long.
        if not any(controls) and sizes == [sizes[0]] * count and names == sender * count:
            return self._joined(range(count), sender, sizes[0], 0)

        def kind(index: int) -> tuple[bytes, int, int]:
            sender = names[index * _NAME_BYTES : (index + 1) * _NAME_BYTES]
            return sender, sizes[index], self._segment(index) if controls[index] else 0

        groups = groupby(range(count), kind)
        return [run for alike, indices in groups for run in self._joined(list(indices), *alike)]

    def _joined(self, indices: Sequence[int], sender: bytes, size: int, segment: int) -> list[Run]:
        """Of one sender and size, and all or none of them several that arrived as one."""
        most = 1 if segment or not size else max(1, min(_RUN_LIMIT, _RUN_LIMIT_BYTES // size))
        data = self._view
        starts = [index * _DATAGRAM_LIMIT_BYTES for index in indices]
        pieces = [data[start : start + size] for start in starts]
        return [
            Run(data=b"".join(pieces[at : at + most]), size=segment or size or 1, sender=sender)
            for at in range(0, len(pieces), most)
        ]

    def _segment(self, index: int) -> int:
        """The size of each of several datagrams that arrived as one; 0 where they did not."""
        _, level, kind, size = struct.unpack_from("@Niii", self._controls, index * _CONTROL_BYTES)
        return int(size) if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO) else 0


def send(end: socket.socket, run: Run, address: Any = None) -> None:
    """Without an address, to whom the socket is connected. What the system does not take is lost."""
    if sys.platform == "linux" and len(run.data) > run.size:
        ancillary = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("@H", run.size))]
        with suppress(OSError):
            end.sendmsg([run.data], ancillary, 0, *([address] if address else []))
            return
    for datagram in run.datagrams():
        with suppress(OSError):
            end.sendto(datagram, address) if address else end.send(datagram)


class DatagramDoor:
    """Sends on what it is sent, from a socket for each sender, and back what that socket is sent."""

    def __init__(self, listener: socket.socket, target: Any, ways: tuple[Way, Way]) -> None:
        self._listener = listener
        self._target = target
        self._ways = ways
        self._queues = tuple(DelayQueue[_Sending](way, _deliver, drops=True) for way in ways)
        self._flows: dict[bytes, _Flow] = {}

    def start(self) -> None:
        tune(self._listener)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for runs in reader(self._listener):
            for run in runs:
                # Where there is no way to the target, what is sent there is lost.
                with suppress(OSError):
                    flow = self._flows.get(run.sender) or self._new_flow(run.sender)
                    self._pass(0, run, flow.end, None)

    def _new_flow(self, sender: bytes) -> _Flow:
        if len(self._flows) >= _FLOWS_LIMIT:
            self._flows.pop(next(iter(self._flows))).forget()
        end = socket.socket(self._listener.family, socket.SOCK_DGRAM)
        try:
            tune(end)
            end.connect(self._target)
        except OSError:
            end.close()
            raise
        flow = self._flows[sender] = _Flow(end, address_of(sender))
        threading.Thread(target=self._read_back, args=(flow,), daemon=True).start()
        return flow

    def _read_back(self, flow: _Flow) -> None:
        with flow.end:
            for runs in reader(flow.end):
                if flow.over:
                    return
                for run in runs:
                    self._pass(1, run, self._listener, flow.address)

    def _pass(self, index: int, run: Run, end: socket.socket, address: Any) -> None:
        way, queue = self._ways[index], self._queues[index]
        conditions = way.conditions
        if not (conditions.loss or conditions.bytes_s or conditions.jitter_s):
            queue.take(_Sending(end, run, address), len(run.data))
            return
        for datagram in run.datagrams():
            if not way.loses():
                alone = Run(data=datagram, size=len(datagram) or 1, sender=run.sender)
                queue.take(_Sending(end, alone, address), len(datagram))


class _Flow:
    """One sender: where it is, and the socket that stands for it before the target."""

    def __init__(self, end: socket.socket, address: Any) -> None:
        self.end = end
        self.address = address
        self.over = False

    def forget(self) -> None:
        self.over = True
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)


class _Sending(NamedTuple):
    end: socket.socket
    run: Run
    address: Any


def _deliver(sending: _Sending | None) -> None:
    if sending is not None:
        send(*sending)


def address_of(name: bytes) -> tuple[Any, ...]:
    """As Python writes it."""
    if sys.platform != "linux":
        address: tuple[Any, ...] = ast.literal_eval(name.decode())
        return address
    (family,) = struct.unpack_from("@H", name)
    (port,) = struct.unpack_from("!H", name, 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, name[4:8]), port
    return socket.inet_ntop(socket.AF_INET6, name[8:24]), port
