"""What one way of a line does to what passes: delay, jitter, bandwidth, loss; and when something arrives.

Jitter spreads the delay evenly between `delay_s` − `jitter_s` and `delay_s` + `jitter_s`; it never changes
the order. Loss is for each packet. A datagram that is lost is gone. A stream loses no bytes: it costs what
retransmitting costs TCP on Linux, one more round trip (twice `delay_s`) amid many packets, and the least
retransmission time-out on top where too few follow to show that one is missing. What congestion control
makes of loss is not modelled for streams: their ends see none.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections import deque

from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen

PACKET_BYTES = 1448
"""Of a TCP segment's payload in an Ethernet frame."""
RETRANSMIT_S = 0.2
"""Linux's least time-out for retransmitting."""
_TELLING_PACKETS = 4
"""Three that follow a lost one, each answered by a duplicate acknowledgement, have it sent again at once."""
_HIGHEST_S = 60.0
_LATENESS_KEPT = 4096


@frozen
class Conditions:
    """Of one direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_s: float | None = None
    """None: as fast as the machine."""
    loss: float = 0.0
    """The share of packets that is lost."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _HIGHEST_S:
            raise UsageError(f"a delay of {1000 * self.delay_s:g} ms is not between 0 and 60,000 ms")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise UsageError(
                f"a jitter of {1000 * self.jitter_s:g} ms is more than the delay or less than nothing",
                hint="jitter takes away from the delay as often as it adds to it",
            )
        if self.bytes_s is not None and not self.bytes_s > 0:
            raise UsageError("a bandwidth has to be more than nothing")
        if not 0 <= self.loss < 1:
            raise UsageError(f"a loss of {self.loss:.0%} is not at least 0 % and less than 100 %")

    @property
    def is_open(self) -> bool:
        """Nothing is held up."""
        return not (self.delay_s or self.bytes_s or self.loss)

    def text(self) -> str:
        """For people."""
        jitter = f" ± {1000 * self.jitter_s:g}" if self.jitter_s else ""
        speed = f", {self.bytes_s / 1e6:g} MB/s" if self.bytes_s else ""
        loss = f", {100 * self.loss:g} % lost" if self.loss else ""
        return f"{1000 * self.delay_s:g}{jitter} ms{speed}{loss}"


@frozen
class Passage:
    """What chunks in one direction really experienced."""

    chunks: int
    size_bytes: int
    median_ms: float
    worst_ms: float
    lost: int = 0
    """Packets: dropped where they are datagrams, sent again where they are a stream's."""


class Way:
    """One direction of a line, or of all connections through one: they share its bandwidth.

    `conditions` may be set at any time. What is on its way already arrives as it would have.
    """

    def __init__(self, conditions: Conditions, *, seed: str) -> None:
        self.conditions = conditions
        self._random = random.Random(seed)
        self._free_at = 0.0
        """When its bandwidth has sent everything that came before."""
        self._lock = threading.Lock()
        self._delays: deque[float] = deque(maxlen=_LATENESS_KEPT)
        self._chunks = self._bytes = self._lost = 0

    def arrival(self, now: float, size_bytes: int) -> float:
        """When that much arrives if it is sent now."""
        conditions = self.conditions
        with self._lock:
            start = now
            if conditions.bytes_s:
                start = self._free_at = max(now, self._free_at) + size_bytes / conditions.bytes_s
            jitter_s = self._random.uniform(-1, 1) * conditions.jitter_s if conditions.jitter_s else 0.0
        return start + conditions.delay_s + jitter_s

    def loses(self) -> bool:
        """Whether the next packet is lost."""
        loss = self.conditions.loss
        if not loss:
            return False
        with self._lock:
            lost = self._random.random() < loss
            self._lost += lost
        return lost

    def retransmitting_s(self, size_bytes: int) -> float:
        """How much later a stretch of a stream arrives because some of it was lost."""
        conditions = self.conditions
        if not conditions.loss:
            return 0.0
        packets = -(-size_bytes // PACKET_BYTES)
        round_trip_s = 2 * conditions.delay_s
        late_s = 0.0
        # What is sent again may be lost again; ten times in a row has ended other connections, too.
        for _ in range(10):
            lost = sum(self.loses() for _ in range(packets))
            if not lost:
                break
            late_s += round_trip_s + (0.0 if packets >= _TELLING_PACKETS else RETRANSMIT_S)
            packets = lost
        return late_s

    def drop(self) -> None:
        """One found no room."""
        with self._lock:
            self._lost += 1

    def count(self, size_bytes: int, delay_s: float) -> None:
        with self._lock:
            self._delays.append(delay_s)
            self._chunks += 1
            self._bytes += size_bytes

    def passage(self) -> Passage:
        with self._lock:
            delays = [1000 * delay for delay in self._delays] or [0.0]
            return Passage(
                chunks=self._chunks,
                size_bytes=self._bytes,
                median_ms=statistics.median(delays),
                worst_ms=max(delays),
                lost=self._lost,
            )
