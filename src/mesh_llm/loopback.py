"""How a program of this machine is told from a web page that a browser on it has open.

A page can make its visitor's browser call `http://localhost:PORT`. Two headers that it
cannot forge give it away: `Origin`, and `Host` where the page's own name was made to
resolve to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine reach `address`; names other than localhost do not count."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Names:
    """What a server on loopback is called by those who mean it."""

    def __init__(self, *also: str) -> None:
        """`also`: other addresses on which it listens."""
        names = {*_NAMES, *(f"[{address}]" if ":" in address else address for address in also)}
        host = "(?:" + "|".join(re.escape(name) for name in sorted(names)) + ")(?::[0-9]{1,5})?"
        self._host = re.compile(host, re.IGNORECASE)
        self._origin = re.compile(f"https?://{host}", re.IGNORECASE)

    def mean_us(self, hosts: Sequence[str]) -> bool:
        """All `Host` headers of a request: there has to be one, and no other."""
        return len(hosts) == 1 and self._host.fullmatch(hosts[0]) is not None

    def are_local(self, origins: Sequence[str]) -> bool:
        """All `Origin` headers; programs send none.

        A page without an origin of its own (a file, a sandboxed frame) says "null": a stranger, too.
        """
        return all(self._origin.fullmatch(origin) for origin in origins)
