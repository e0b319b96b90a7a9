"""When to try which address: the lower id first, then less and less often."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from mesh_llm.membership.seeded_random import SeededRandom
from mesh_llm.types import NodeId

MEMBER_DIAL_SECOND_S = 1.0
"""The lower id dials first; the other one after this, if nothing came: a NAT may be in the way."""
MEMBER_DIAL_FIRST_S = 2.0
"""Between the first two attempts; doubles from there."""
MEMBER_DIAL_LIMIT_S = 30.0
"""Between attempts at a lost member: how long a mended network may stay unnoticed at the worst."""


_AGAIN_S = 0.2
"""Within the grace after which a member that closed its connection is dead."""


class DialBackoff:
    def __init__(self, me: NodeId, dice: SeededRandom) -> None:
        self._me = me
        self._dice = dice
        self._due: list[tuple[float, NodeId]] = []
        self._at: dict[NodeId, float] = {}
        self._pause_s: dict[NodeId, float] = {}

    def begin(self, node: NodeId, now: float, *, again: bool = False) -> None:
        """Have `node` dialled; where that is so already, nothing changes.

        `again` after a connection was lost: the other side may not know yet, so we hardly wait for it.
        """
        if node not in self._at:
            self._pause_s[node] = MEMBER_DIAL_FIRST_S
            second_s = _AGAIN_S if again else MEMBER_DIAL_SECOND_S
            self._set(node, now if self._me < node else now + second_s + self._jitter(second_s / 4))

    def end(self, node: NodeId) -> None:
        self._at.pop(node, None)
        self._pause_s.pop(node, None)

    def hasten(self, now: float) -> None:
        """Something changed for the better: try them all soon, and not all at once."""
        for node in self._at:
            self._pause_s[node] = MEMBER_DIAL_FIRST_S
            self._at[node] = min(self._at[node], now + self._jitter(MEMBER_DIAL_FIRST_S))
        self._due = [(at, node) for node, at in self._at.items()]
        heapify(self._due)

    def due(self, now: float) -> NodeId | None:
        """The next one to be dialled now, which is then due again after a longer pause."""
        while self._due and self._due[0][0] <= now:
            at, node = heappop(self._due)
            if self._at.get(node) == at:
                pause_s = self._pause_s[node]
                self._pause_s[node] = min(2 * pause_s, MEMBER_DIAL_LIMIT_S)
                self._set(node, now + pause_s * 0.75 + self._jitter(pause_s * 0.5))
                return node
        return None

    def _set(self, node: NodeId, at: float) -> None:
        self._at[node] = at
        heappush(self._due, (at, node))

    def _jitter(self, width_s: float) -> float:
        return self._dice.fraction() * width_s
