"""Whether a connection to a port of this machine comes from the node's own user.

Loopback is open to every user of a machine. Linux tells whose socket is at the other end;
elsewhere nobody does, and all users count as one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_ROOT = 0


def is_foreign(peer: tuple[str, int], lines: Iterable[str] | None = None) -> bool:
    """Of an IPv4 address and port. `lines`: the system's table of sockets, where it is not to be read."""
    owner = _owner(peer, _read() if lines is None else lines)
    return owner is not None and owner not in (_ROOT, os.getuid())


def _read() -> list[str]:
    try:
        return _TABLE.read_text().splitlines()
    except OSError:
        return []


def _owner(peer: tuple[str, int], lines: Iterable[str]) -> int | None:
    """None where there is no such socket, or no such table."""
    # In the machine's own order of bytes, as the system writes it.
    (address,) = struct.unpack("=I", IPv4Address(peer[0]).packed)
    local = f"{address:08X}:{peer[1]:04X}"
    for line in lines:
        fields = line.split()
        if len(fields) > 7 and fields[1] == local:
            return int(fields[7])
    return None
