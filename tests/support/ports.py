"""Ports for programs that are to be found at the same place again."""

from __future__ import annotations

import random
import socket
from contextlib import closing, suppress


def spare_port(kind: socket.SocketKind) -> int:
    """A free one that no system gives away by itself, be it before its first use or between two of them."""
    while True:
        port = random.randrange(10_000, 32_000)
        with closing(socket.socket(socket.AF_INET, kind)) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
