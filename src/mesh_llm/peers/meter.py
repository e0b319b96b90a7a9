"""How much crosses a connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Meter:
    """Bytes both ways; a connection that was made anew counts from nothing."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bytes_per_s: float = 0.0
    """Since the last reading but one."""
    peak_bytes_per_s: float = 0.0
    _read_at: float | None = None

    def read(self, sent_bytes: int, received_bytes: int, now: float) -> None:
        before = self.sent_bytes + self.received_bytes
        grown = sent_bytes + received_bytes - before
        if self._read_at is not None and now > self._read_at and grown >= 0:
            self.bytes_per_s = grown / (now - self._read_at)
            self.peak_bytes_per_s = max(self.peak_bytes_per_s, self.bytes_per_s)
        self.sent_bytes, self.received_bytes, self._read_at = sent_bytes, received_bytes, now
