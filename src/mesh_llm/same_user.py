"""Whether a connection to a port of this machine comes from the node's own user.

Loopback is open to every user of a machine. Linux tells whose socket is at the other end;
elsewhere nobody does, and all users count as one.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Programs that speak IPv6 reach 127.0.0.1 as well, and stand in a table of their own."""
_ROOT = 0

Place = tuple[str, int]
"""An IPv4 address and a port."""


def is_of_another_user(transport: asyncio.BaseTransport | None) -> bool:
    if transport is None:
        return False
    peer, own = (transport.get_extra_info(end) for end in ("peername", "sockname"))
    # Those of an IPv4 connection; of others it is not told.
    known = all(isinstance(end, tuple) and len(end) == 2 for end in (peer, own))
    return known and is_foreign(peer, own)


def is_foreign(peer: Place, own: Place, lines: Iterable[str] | None = None) -> bool:
    """Of a connection, by its two ends. `lines`: the tables of sockets, where they are not to be read."""
    owner = _owner(peer, own, _read() if lines is None else lines)
    return owner is not None and owner not in (_ROOT, os.getuid())


def _read() -> list[str]:
    lines = []
    for table in _TABLES:
        with suppress(OSError):
            lines += table.read_text().splitlines()
    return lines


def _owner(peer: Place, own: Place, lines: Iterable[str]) -> int | None:
    """None where there is no such socket, or no such table."""
    # Both ends: a port may be in use for several connections, of several users, to different places.
    ends = [_written(peer), _written(own)]
    mapped = [_MAPPED + end for end in ends]
    for line in lines:
        fields = line.split()
        if len(fields) > 7 and fields[1:3] in (ends, mapped):
            return int(fields[7])
    return None


_MAPPED = f"{0:016X}{struct.unpack('=I', bytes((0, 0, 255, 255)))[0]:08X}"
"""What stands before an IPv4 address where it is written as an IPv6 one."""


def _written(place: Place) -> str:
    """In the machine's own order of bytes, as the system writes it."""
    (address,) = struct.unpack("=I", IPv4Address(place[0]).packed)
    return f"{address:08X}:{place[1]:04X}"
