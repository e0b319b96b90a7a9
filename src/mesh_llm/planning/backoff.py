"""How long a node that failed has no part in plans, a plan that failed is not tried, and a model that failed
has none of others' memory.

Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from mesh_llm.frozen import frozen
from mesh_llm.types import NodeId

RETRY_FIRST_S = 2.0
RETRY_LAST_S = 60.0
"""That a node which failed has no part in plans, doubled each time; never more than a person waits."""
NEEDED_SHARE = 0.1
"""Of its pause, that a node is kept out while nothing can serve without it: from 0.2 s to 6 s."""
RETRY_FORGET_S = 300.0
"""A node, or a model, that was well for so long starts anew at the shortest pause."""
GIVE_BACK_FIRST_S = 60.0
GIVE_BACK_LAST_S = 1800.0
"""That a model which failed twice in a row leaves its memory to those that gave way to it, doubled each time:
each of its tries costs them an engine's start, and their answers."""


@frozen
class NodeFailure:
    """The last of a node's failures, and how long it counts."""

    reason: str
    pause_s: float
    until_s: float

    def end_s(self, share: float) -> float:
        """Of that share of the pause."""
        return self.until_s - (1 - share) * self.pause_s


@frozen
class Backoff:
    """Failures by node. Each one in a row doubles the pause; five minutes of health forget them all."""

    failures: Mapping[NodeId, NodeFailure] = field(default_factory=dict)

    def failed(self, node: NodeId, reason: str, *, now: float) -> Backoff:
        before = self.failures.get(node)
        fresh = before is None or now >= before.until_s + RETRY_FORGET_S
        pause = RETRY_FIRST_S if fresh or before is None else min(2 * before.pause_s, RETRY_LAST_S)
        failure = NodeFailure(reason=reason, pause_s=pause, until_s=now + pause)
        return replace(self, failures={**self._remembered(now), node: failure})

    def barred(self, *, now: float, share: float = 1.0) -> dict[NodeId, str]:
        """Who is kept out at this moment, and why; for a share of each pause."""
        return {node: failure.reason for node, failure in self.failures.items() if now < failure.end_s(share)}

    def next_change(self, *, now: float) -> float | None:
        """When the next node may be tried again, needed or not: time to decide anew."""
        ends = (each.end_s(share) for each in self.failures.values() for share in (NEEDED_SHARE, 1.0))
        return min((end_s for end_s in ends if now < end_s), default=None)

    def forget(self, node: NodeId) -> Backoff:
        """It has changed: come back under a higher incarnation, or been given what it lacked."""
        return replace(self, failures={id: each for id, each in self.failures.items() if id != node})

    def _remembered(self, now: float) -> dict[NodeId, NodeFailure]:
        return {id: each for id, each in self.failures.items() if now < each.until_s + RETRY_FORGET_S}


@frozen
class BetterPlan:
    """One that failed while another one served, and until when that is good enough.

    Each of its tries costs workers its layers, and answers under way a part of the machines.
    """

    key: tuple[object, ...] = ()
    """What tells it from other plans, each of which may be tried at once."""
    pause_s: float = 0.0
    until_s: float = 0.0

    def failed(self, key: tuple[object, ...], *, now: float) -> BetterPlan:
        pause_s = min(2 * self.pause_s, RETRY_LAST_S) if key == self.key else RETRY_FIRST_S
        return BetterPlan(key=key, pause_s=pause_s, until_s=now + pause_s)

    def waits(self, key: tuple[object, ...], *, now: float) -> bool:
        return key == self.key and now < self.until_s


@frozen
class GivingBack:
    """How often in a row a model failed on a node, and until when others have the memory there."""

    failures: int = 0
    until_s: float = 0.0

    def failed(self, *, now: float, well_s: float) -> GivingBack:
        """`well_s`: how long it had served. Once may be chance: it is tried again at once."""
        failures = 1 if well_s >= RETRY_FORGET_S else self.failures + 1
        pause_s = min(GIVE_BACK_FIRST_S * 2.0 ** min(failures - 2, 10), GIVE_BACK_LAST_S)
        return GivingBack(failures=failures, until_s=now + pause_s if failures > 1 else 0.0)
