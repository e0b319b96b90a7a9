"""How much one client of the relay may use."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.defaults import (
    RELAY_CLIENT_BYTES_S,
    RELAY_CLIENTS,
    RELAY_DEAD_S,
    RELAY_HANDSHAKE_S,
    RELAY_PER_ADDRESS,
    RELAY_PING_S,
    RELAY_QUEUE_BYTES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
