"""Whether a connection to a port of this machine comes from the node's own user.

Loopback is open to every user of a machine. Linux tells whose socket is at the other end; a
caller that has none there, or not any more, is a stranger. Elsewhere nobody tells, and all users
count as one.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, ip_address
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Programs that speak IPv6 reach 127.0.0.1 as well, and stand in a table of their own."""
_MAPPED = bytes(10) + b"\xff\xff"
"""What stands before an IPv4 address where it is written as an IPv6 one."""
_ROOT = 0

Place = tuple[str, int]
"""An address and a port."""


def is_of_another_user(transport: asyncio.BaseTransport | None) -> bool:
    if transport is None:
        return True
    peer, own = (transport.get_extra_info(end) for end in ("peername", "sockname"))
    # IPv6 tells two numbers more.
    known = all(isinstance(end, tuple) and len(end) in (2, 4) for end in (peer, own))
    return not known or is_foreign(peer[:2], own[:2])


def is_foreign(peer: Place, own: Place, lines: Sequence[str] | None = None) -> bool:
    """Of a connection, by its two ends. `lines`: the tables of sockets, where they are not to be read."""
    lines = _read() if lines is None else lines
    return bool(lines) and _owner(peer, own, lines) not in (_ROOT, os.getuid())


def _read() -> list[str]:
    lines = []
    for table in _TABLES:
        with suppress(OSError):
            lines += table.read_text().splitlines()
    return lines


def _owner(peer: Place, own: Place, lines: Sequence[str]) -> int | None:
    """None where nobody holds the socket."""
    # Both ends: a port may be in use for several connections, of several users, to different places.
    peers, owns = _written(peer), _written(own)
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[1] in peers and fields[2] in owns:
            # Without an inode its program has closed it, and the system calls root its owner.
            return int(fields[7]) if fields[9] != "0" else None
    return None


def _written(place: Place) -> list[str]:
    """As each of the tables has it: 32 bits at a time, in the machine's own order of bytes."""
    address = ip_address(place[0])
    short = address if isinstance(address, IPv4Address) else address.ipv4_mapped
    forms = [address.packed] if short is None else [short.packed, _MAPPED + short.packed]
    return [
        "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", form)) + f":{place[1]:04X}"
        for form in forms
    ]
