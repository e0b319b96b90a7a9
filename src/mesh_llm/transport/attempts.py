"""How many failed attempts to get in are borne, from one node and from all together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mesh_llm.defaults import (
    FAILED_NODES_LIMIT,
    FAILED_OVERALL,
    FAILED_OVERALL_REFILL_S,
    FAILED_PER_NODE,
    FAILED_PER_NODE_REFILL_S,
)
from mesh_llm.types import NodeId


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Holds up to `size` tokens and gains one every `refill_s`; time is passed in, and may jump."""

    size: float
    refill_s: float
    tokens: float
    seen_s: float

    @classmethod
    def full(cls, *, size: float, refill_s: float, now: float) -> Bucket:
        return cls(size=size, refill_s=refill_s, tokens=size, seen_s=now)

    def has_one(self, now: float) -> bool:
        self.tokens = min(self.size, self.tokens + max(0.0, now - self.seen_s) / self.refill_s)
        self.seen_s = now
        return self.tokens >= 1

    def take(self, now: float) -> None:
        self.has_one(now)
        self.tokens = max(0.0, self.tokens - 1)


class FailedAttempts:
    """Only failures count: members come and go as often as they like.

    Ids cost nothing, so that a flood uses a new one for each attempt; the bound on all together keeps
    its cost small. A legitimate node that is turned away meanwhile tries again, and each attempt of
    its has the same chance as each of the flood's.
    """

    def __init__(self, *, now: float) -> None:
        self._overall = Bucket.full(size=FAILED_OVERALL, refill_s=FAILED_OVERALL_REFILL_S, now=now)
        self._nodes: OrderedDict[NodeId, Bucket] = OrderedDict()
        self.count = 0

    def allow_anyone(self, now: float) -> bool:
        return self._overall.has_one(now)

    def allow(self, node: NodeId, now: float) -> bool:
        bucket = self._nodes.get(node)
        return bucket is None or bucket.has_one(now)

    def failed(self, node: NodeId | None, now: float) -> None:
        """`node` is None where it did not get as far as to have an id."""
        self.count += 1
        self._overall.take(now)
        if node is None:
            return
        bucket = self._nodes.pop(node, None)
        if bucket is None:
            bucket = Bucket.full(size=FAILED_PER_NODE, refill_s=FAILED_PER_NODE_REFILL_S, now=now)
        bucket.take(now)
        self._nodes[node] = bucket
        while len(self._nodes) > FAILED_NODES_LIMIT:
            self._nodes.popitem(last=False)
