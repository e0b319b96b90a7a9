"""One connection: when the other side was heard, how long its answers take, whom it hears."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from statistics import median

from mesh_llm.types import NodeId

MEMBER_PING_S = 1.0
"""Two hundred bytes each way and peer: noticed within seconds, and nobody's data plan."""
MEMBER_HURRY_S = 0.3
"""Without an answer to a ping (twice the usual delay, where that is more): ask again with every tick."""
MEMBER_RTT_SAMPLES = 9
"""Whose median counts: up to four outliers do no harm, and a change shows within five seconds."""
MEMBER_RTT_LEAST = 3
"""Before that nothing is said: the first samples of a connection are its handshake's."""


_OUTSTANDING = 8
"""Pings whose answers are still waited for; older ones came too late to say anything."""
_HURRY_GAP_S = 0.2
"""Just less than a tick."""


class Heartbeat:
    def __init__(self, node: NodeId, now: float) -> None:
        self.node = node
        self.up_at = now
        self.heard_at = now
        self.hears: frozenset[NodeId] = frozenset()
        """As the other side has told."""
        self.hears_digest = digest_of(())
        self.kept = True
        """Whether the other side wants the connection."""
        self.surplus_since: float | None = None
        self.differs_since: float | None = None
        """Since when its digest has been another one."""
        self.synced_at = float("-inf")
        self.compared_at = float("-inf")
        self.challenged: tuple[int, float] = (-1, float("-inf"))
        """The incarnation that was last said to be gone, and when we told."""
        self._pinged_at = float("-inf")
        self._sent: dict[int, float] = {}
        self._samples: deque[float] = deque(maxlen=MEMBER_RTT_SAMPLES)
        self._first = True

    def silence(self, now: float) -> float:
        return now - self.heard_at

    def ping_due(self, now: float) -> bool:
        # A little early: ticks are not exact, and a late one would make it a second and a quarter.
        if now - self._pinged_at >= MEMBER_PING_S - 0.05:
            return True
        if now - self._pinged_at < _HURRY_GAP_S or not self._sent:
            return False
        patience_s = max(MEMBER_HURRY_S, 2 * (self.rtt_s or 0.0))
        return now - next(iter(self._sent.values())) > patience_s

    def pinged(self, number: int, now: float) -> None:
        self._pinged_at = now
        self._sent[number] = now
        if len(self._sent) > _OUTSTANDING:
            del self._sent[next(iter(self._sent))]

    def answered(self, number: int, now: float) -> None:
        sent_at = self._sent.get(number)
        if sent_at is None or now < sent_at:
            return
        # Earlier ones are lost, or so late that they say nothing.
        self._sent = {other: at for other, at in self._sent.items() if other > number}
        if self._first:
            self._first = False
            return
        self._samples.append(now - sent_at)

    @property
    def rtt_s(self) -> float | None:
        return median(self._samples) if len(self._samples) >= MEMBER_RTT_LEAST else None

    def restart(self, now: float) -> None:
        """After a sleep of ours: what we know of the time before says nothing."""
        self.heard_at = now
        self._pinged_at = float("-inf")
        self._sent.clear()

    def told(self, nodes: Iterable[NodeId]) -> frozenset[NodeId]:
        """Take what the other side hears; returns those for whom that is different now."""
        before = self.hears
        self.hears = frozenset(nodes)
        self.hears_digest = digest_of(self.hears)
        return before ^ self.hears


def digest_of(nodes: Iterable[NodeId]) -> int:
    text = " ".join(sorted(nodes)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
