"""One endpoint that is connected to the relay."""

from __future__ import annotations

import asyncio

from mesh_llm.defaults import RELAY_PACKET_LIMIT_BYTES, RELAY_STOP_S
from mesh_llm.relay.limits import Allowance, RelayLimits

RELAY_CONTACTS = 1024
"""Ids that a client has written to, who are told when it goes; ten times a mesh."""


_CLOSE = b"\x88\x02\x03\xe8"
"""WebSocket's goodbye, with the code for an ordinary end."""


class RelayClient:
    """What the relay keeps for an endpoint, and the way to it.

    What waits for it to read is what its transport holds: there is no queue beside that,
    and nobody ever waits here. A datagram that finds too much waiting is dropped, as a
    full router would do; QUIC sends it again.
    """

    def __init__(
        self, *, id: bytes, transport: asyncio.Transport, version: str, limits: RelayLimits, now: float
    ) -> None:
        self.id = id
        self.version = version
        self.contacts: set[bytes] = set()
        """Whom it has talked with."""
        self.allowance = Allowance(limits.client_bytes_s, now)
        self.heard_at = now
        self.asked_at = now
        self._transport = transport
        self._queue_bytes = limits.queue_bytes
        self._stuck_since: float | None = None

    @property
    def name(self) -> str:
        return self.id.hex()[:10]

    @property
    def waiting_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def meet(self, other: RelayClient) -> None:
        if other.id not in self.contacts:
            for one, id in ((self, other.id), (other, self.id)):
                if len(one.contacts) < RELAY_CONTACTS:
                    one.contacts.add(id)

    def deliver(self, frame: bytes) -> bool:
        """Send a message with datagrams; False if there is no room for it, or nobody any more."""
        if self.waiting_bytes > self._queue_bytes or self._transport.is_closing():
            return False
        self._write(frame)
        return True

    def tell(self, frame: bytes) -> None:
        """Send a short message that must arrive. Who does not read even those is cut off."""
        if self._transport.is_closing():
            return
        if self.waiting_bytes > self._queue_bytes + 2 * RELAY_PACKET_LIMIT_BYTES:
            self.abort()
        else:
            self._write(frame)

    def stuck_for_s(self, now: float) -> float:
        """How long it has left too much unread; to be asked now and then."""
        if self.waiting_bytes <= self._queue_bytes:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        return 0.0 if self._stuck_since is None else now - self._stuck_since

    def dismiss(self) -> None:
        """Close the connection; whoever does not read the rest of it is cut off soon."""
        if self._transport.is_closing():
            return
        self._transport.write(_CLOSE)
        self._transport.close()
        asyncio.get_running_loop().call_later(RELAY_STOP_S, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    def _write(self, payload: bytes) -> None:
        # Only while the transport is not closing: uvloop raises for what is written afterwards.
        # A server's frames are a few bytes of head: written here they cost a fifth of what
        # a coroutine per datagram would, and wait for nobody.
        length = len(payload)
        if length < 126:
            self._transport.write(b"\x82" + length.to_bytes(1, "big") + payload)
        elif length < 1 << 16:
            self._transport.write(b"\x82\x7e" + length.to_bytes(2, "big") + payload)
        else:
            self._transport.write(b"\x82\x7f" + length.to_bytes(8, "big") + payload)
