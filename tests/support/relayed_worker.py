"""A worker behind a relay, which sees its commands and answers, and may cut or change them."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from mesh_llm.engine.worker_process import WorkerProcess

HEADER = struct.Struct("<B3xIQ")
"""Of each frame: its kind, its ticket, the size of what follows."""


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
