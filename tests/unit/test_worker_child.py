"""What the child that lends a device does while its machine is short of descriptors or threads."""

from __future__ import annotations

import errno
import json
import socket
from typing import Any, cast

import pytest

from mesh_llm.engine.children import worker
from mesh_llm.errors import EngineFailed


class FullListener:
    """Out of descriptors the first times."""

    def __init__(self, times: int, then: socket.socket) -> None:
        self._left = times
        self._then = then

    def accept(self) -> tuple[socket.socket, str]:
        if self._left:
            self._left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._then, ""


def test_a_connection_waits_for_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_ACCEPT_AGAIN_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert worker._accepted(cast(socket.socket, FullListener(3, theirs))) is theirs


class NoThreads:
    """Cannot start another thread."""

    def add_peer(self, number: int, descriptor: int) -> None:
        raise EngineFailed(f"the link to worker {number} cannot be used")


@pytest.mark.parametrize("what", [{"kind": "peer", "number": 7}, {"kind": "session"}])
def test_a_link_that_cannot_be_served_is_closed(
    what: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker, "_start", start)
    desk = worker._Desk(cast(Any, NoThreads()), lambda _: None)
    ours, theirs = socket.socketpair()
    link, handed = socket.socketpair()
    with ours, link, handed:
        socket.send_fds(ours, [json.dumps(what).encode() + b"\n"], [handed.fileno()])
        desk.take(theirs)
        assert ours.recv(64) == b""
        handed.close()
        if what["kind"] == "session":
            assert link.recv(1) == b""
