"""How many failed attempts to get in are borne, from one node and from all together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mesh_llm.defaults import HANDSHAKES_LIMIT
from mesh_llm.types import NodeId

FAILED_PER_NODE = 5.0
FAILED_PER_NODE_REFILL_S = 10.0
"""A person mistypes five times, then once in ten seconds."""
FAILED_OVERALL = 100.0
FAILED_OVERALL_REFILL_S = 0.02
"""Wrong tokens from ever new ids: fifty a second take a sixth of a core, and leave the rest to members."""
FAILED_PER_SOURCE = 20.0
FAILED_PER_SOURCE_REFILL_S = 1.0
"""From one IP address, which may be a whole office's, while wrong tokens pour in."""
FAILED_KEYS_LIMIT = 1024
"""Nodes and sources that are remembered for it."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Holds up to `size` tokens and gains one every `refill_s`; time is passed in, and may jump.

    What is taken beyond that is owed, up to `debt`.
    """

    size: float
    refill_s: float
    tokens: float
    seen_s: float
    debt: float = 0.0

    @classmethod
    def full(cls, *, size: float, refill_s: float, now: float, debt: float = 0.0) -> Bucket:
        return cls(size=size, refill_s=refill_s, tokens=size, seen_s=now, debt=debt)

    def has_one(self, now: float) -> bool:
        self.tokens = min(self.size, self.tokens + max(0.0, now - self.seen_s) / self.refill_s)
        self.seen_s = now
        return self.tokens >= 1

    def take(self, now: float) -> None:
        self.has_one(now)
        self.tokens = max(-self.debt, self.tokens - 1)


class _Buckets:
    """One per key, the longest unused forgotten first."""

    def __init__(self, *, size: float, refill_s: float) -> None:
        self._size = size
        self._refill_s = refill_s
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def has_one(self, key: str, now: float) -> bool:
        bucket = self._buckets.get(key)
        return bucket is None or bucket.has_one(now)

    def take(self, key: str, now: float) -> None:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = Bucket.full(size=self._size, refill_s=self._refill_s, now=now)
        bucket.take(now)
        self._buckets[key] = bucket
        while len(self._buckets) > FAILED_KEYS_LIMIT:
            self._buckets.popitem(last=False)


class FailedAttempts:
    """Only failures count: members come and go as often as they like.

    Ids cost nothing, so that a flood uses a new one for each attempt; the bound on all together keeps its
    cost small. Once that is reached, those still get through who come from where no flood comes from. A
    legitimate node beside the flood tries again, and each attempt has the same chance as each of the flood's.
    """

    def __init__(self, *, now: float) -> None:
        # Those who fail together were let in together, all by one token: the rest of them is owed.
        self._overall = Bucket.full(
            size=FAILED_OVERALL, refill_s=FAILED_OVERALL_REFILL_S, now=now, debt=HANDSHAKES_LIMIT
        )
        self._sources = _Buckets(size=FAILED_PER_SOURCE, refill_s=FAILED_PER_SOURCE_REFILL_S)
        self._nodes = _Buckets(size=FAILED_PER_NODE, refill_s=FAILED_PER_NODE_REFILL_S)
        self.count = 0

    def is_calm(self, now: float) -> bool:
        """Whether anybody may try."""
        return self._overall.has_one(now)

    def allow_source(self, source: str, now: float) -> bool:
        """Whether those from there may try while it is not calm; the source has to be proven."""
        return self._sources.has_one(source, now)

    def allow_node(self, node: NodeId, now: float) -> bool:
        return self._nodes.has_one(node, now)

    def failed(self, *, source: str, node: NodeId | None, now: float) -> None:
        """`node` is None where it did not get as far as to have an id."""
        self.count += 1
        self._overall.take(now)
        self._sources.take(source, now)
        if node is not None:
            self._nodes.take(node, now)
