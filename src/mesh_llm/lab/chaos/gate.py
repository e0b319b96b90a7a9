"""A link that can be held up: bytes wait at it while it is shut, and take longer while it is slow."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_CHUNK_BYTES = 1 << 18
_LOOK_S = 0.05
"""Between two looks at whether a shut gate has been opened."""


class Weather:
    """What links of this node are like now."""

    def __init__(self) -> None:
        self.cut: frozenset[str] = frozenset()
        """Nodes that cannot be reached."""
        self.delay_s = 0.0


def gated(link: socket.socket, node: str, weather: Weather) -> socket.socket:
    """The near end of a link to `node` that keeps to the weather. `link` belongs to it from here on."""
    here, there = socket.socketpair()
    for end in (link, there):
        end.setblocking(True)

    def is_shut() -> bool:
        return node in weather.cut

    pumps = [
        threading.Thread(target=_pump, args=(source, target, weather, is_shut), daemon=True)
        for source, target in ((link, there), (there, link))
    ]
    for pump in pumps:
        pump.start()
    threading.Thread(target=_close_after, args=(pumps, (link, there)), daemon=True).start()
    return here


def _pump(
    source: socket.socket, target: socket.socket, weather: Weather, is_shut: Callable[[], bool]
) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            time.sleep(weather.delay_s)
            # That this node itself has given the link up is noticed at once.
            while is_shut() and not _has_ended(source):
                time.sleep(_LOOK_S)
            if not is_shut():
                target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _has_ended(source: socket.socket) -> bool:
    poll = select.poll()
    poll.register(source, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def _close_after(pumps: list[threading.Thread], ends: tuple[socket.socket, socket.socket]) -> None:
    for pump in pumps:
        pump.join()
    for end in ends:
        end.close()
