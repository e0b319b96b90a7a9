"""A worker behind a relay, which sees its commands and answers, and may cut or change them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mesh_llm.engine.worker_process import WorkerProcess

HEADER = struct.Struct("<B3xIQ")
"""Of each frame: its kind, its ticket, the size of what follows."""
_HELLO = 0x81
"""The kind of the answer to it."""


class RelayedWorker(WorkerProcess):
    """Passes everything on; subclasses say what they do otherwise."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(worker.child, Path())
        self._worker = worker

    async def serve(self, link: socket.socket) -> None:
        near, far = socket.socketpair()
        await self._worker.serve(far)
        threading.Thread(target=self._relay, args=(link, near), daemon=True).start()

    def _relay(self, link: socket.socket, near: socket.socket) -> None:
        with link, near:
            answers = threading.Thread(target=self._relay_answers, args=(near, link), daemon=True)
            answers.start()
            with suppress(OSError):
                self.pass_commands(link, near)
            _end(link, near)
            answers.join()

    def _relay_answers(self, near: socket.socket, link: socket.socket) -> None:
        with suppress(OSError):
            self.pass_answers(near, link)
        _end(link, near)

    def pass_commands(self, host: socket.socket, worker: socket.socket) -> None:
        _copy(host, worker)

    def pass_answers(self, worker: socket.socket, host: socket.socket) -> None:
        _copy(worker, host)


Lie = Callable[[int, bytes], tuple[int, bytes]]
"""Kind and payload of an answer, and what becomes of them."""


class Liar(RelayedWorker):
    """A worker whose answers are changed, once it is told to."""

    def __init__(self, worker: WorkerProcess, lie: Lie, *, at_once: bool) -> None:
        super().__init__(worker)
        self.lies = at_once
        self._lie = lie

    def pass_answers(self, worker: socket.socket, host: socket.socket) -> None:
        while len(head := read(worker, HEADER.size)) == HEADER.size:
            kind, ticket, size = HEADER.unpack(head)
            payload = read(worker, size)
            if self.lies:
                kind, payload = self._lie(kind, payload)
            host.sendall(HEADER.pack(kind, ticket, len(payload)) + payload)


def at(offset: int, value: bytes, then: Lie = lambda kind, payload: (kind, payload)) -> Lie:
    """Another value in the answer to HELLO; other answers are `then`'s."""

    def lie(kind: int, payload: bytes) -> tuple[int, bytes]:
        if kind == _HELLO:
            return kind, payload[:offset] + value + payload[offset + len(value) :]
        return then(kind, payload)

    return lie


def read(link: socket.socket, size: int) -> bytes:
    """Less than `size` bytes where the link ends."""
    data = bytearray()
    while len(data) < size and (piece := link.recv(size - len(data))):
        data += piece
    return bytes(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while piece := source.recv(1 << 16):
        target.sendall(piece)


def _end(*links: socket.socket) -> None:
    for link in links:
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
