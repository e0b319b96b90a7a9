"""How much one client of the relay may use."""

from __future__ import annotations

from mesh_llm.defaults import RELAY_CLIENT_BYTES_S, RELAY_CLIENTS, RELAY_PER_ADDRESS
from mesh_llm.frozen import frozen

RELAY_QUEUE_BYTES = 512 << 10
"""A fast line's worth for the time of a round trip; 512 clients that do not read take 256 MB at the worst."""
RELAY_HANDSHAKE_S = 10.0
"""To be let in after connecting: three round trips, and a slow line."""
RELAY_PING_S = 15.0
"""Of silence, before the relay asks: more often than a NAT forgets."""
RELAY_DEAD_S = 40.0
"""Of silence, or without reading anything: two questions were not answered."""


@frozen
class RelayLimits:
    clients: int = RELAY_CLIENTS
    per_address: int = RELAY_PER_ADDRESS
    """Connections from one IP address; 0 for any number, as behind a proxy."""
    client_bytes_s: float = RELAY_CLIENT_BYTES_S
    """What one client may send, over time; 0 for no limit."""
    queue_bytes: int = RELAY_QUEUE_BYTES
    """That wait for one client to read; datagrams beyond are dropped."""
    handshake_s: float = RELAY_HANDSHAKE_S
    ping_s: float = RELAY_PING_S
    dead_s: float = RELAY_DEAD_S


class Allowance:
    """Bytes per second, with a second's worth to spend at once. Time is passed in."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._left = rate
        self._at = now

    def spend(self, count: int, now: float) -> float:
        """Take `count` bytes; for how many seconds nothing more may be taken then."""
        if self._rate <= 0:
            return 0.0
        self._left = min(self._rate, self._left + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._left / self._rate)
