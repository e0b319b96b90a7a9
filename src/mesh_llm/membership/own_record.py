"""This node's own record: nobody else may have the last word about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from mesh_llm.membership.checked_fields import WHOLE_LIMIT
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record, record_text
from mesh_llm.types import NodeFacts, Signed

MEMBER_REFUTE_S = 0.5
"""Between two answers to those who call this node dead, in the long run."""
MEMBER_REFUTATIONS = 32
"""At once: after a restart each of 28 neighbours may doubt it for itself."""
MEMBER_CLAIMS = 3
"""Foreign claims to our id before we believe in a copy; a restart with a clock set back causes one."""
MEMBER_CLAIMS_SENIOR = 6
"""The same for the one that was there first, so that the copy ends and not the original."""
MEMBER_CLAIMS_S = 60.0
"""Within which they have to come."""


COPIED_HOME = "another machine runs with a copy of this node's home"

Seal = Callable[[str], Signed]
"""Signs what this node says about itself."""


class RecordVerdict(Enum):
    FINE = 0
    REFUTED = 1
    COPIED = 2


class OwnRecord:
    def __init__(self, record: Record, seal: Seal) -> None:
        self.record = record
        self._seal = seal
        self._refutations = 0.0
        self._refuted_at = float("-inf")
        self._claims = 0
        self._claims_limit = MEMBER_CLAIMS
        self._claimed_at = float("-inf")

    @property
    def left(self) -> bool:
        return self.record.left

    def sealed(self) -> Record:
        """Signed when somebody is to be told, and not with each change."""
        if self.record.signed is None:
            self.record = replace(self.record, signed=self._seal(record_text(self.record)))
        return self.record

    def publish(self, facts: NodeFacts) -> bool:
        if facts == self.record.facts:
            return False
        self._next(facts=facts)
        return True

    def leave(self) -> None:
        self._next(standing=Standing.LEFT, left=True)

    def _next(self, **changes: object) -> None:
        changed = {"sequence": self.record.sequence + 1, "signed": None, **changes}
        self.record = replace(self.record, **changed)  # type: ignore[arg-type]

    def hinted(self, standing: Standing, incarnation: int, now: float) -> RecordVerdict:
        """Somebody takes this node for suspect or dead."""
        wronged = standing is not Standing.ALIVE and incarnation == self.record.incarnation
        if self.left or not wronged or not self._may_refute(now):
            return RecordVerdict.FINE
        return self._refute(incarnation)

    def _may_refute(self, now: float) -> bool:
        """Many may doubt this node at once, after its restart, say; but nobody makes it shout without end."""
        gained = max(0.0, now - self._refuted_at) / MEMBER_REFUTE_S
        self._refutations = max(0.0, self._refutations - gained)
        self._refuted_at = now
        if self._refutations >= MEMBER_REFUTATIONS:
            return False
        self._refutations += 1
        return True

    def heard(self, said: Record, now: float) -> RecordVerdict:
        """Something that was signed with this node's own key: by an earlier run, or by a copy of its home."""
        mine = self.record
        claimed = (said.incarnation, said.sequence) > (mine.incarnation, mine.sequence)
        if self.left or not claimed:
            return RecordVerdict.FINE
        if self._too_often(said, now):
            return RecordVerdict.COPIED
        return self._refute(said.incarnation)

    def _refute(self, incarnation: int) -> RecordVerdict:
        if incarnation >= WHOLE_LIMIT:
            # Nobody counts that far: there is no way to be heard again under this id.
            return RecordVerdict.COPIED
        self.record = replace(self.record, incarnation=incarnation + 1, signed=None)
        return RecordVerdict.REFUTED

    def _too_often(self, said: Record, now: float) -> bool:
        if abs(now - self._claimed_at) > MEMBER_CLAIMS_S:
            self._claims = 0
            # Refuted by exactly one, we are the newcomer; an incarnation far from ours is a newcomer's.
            newcomer = said.incarnation == self.record.incarnation + 1
            self._claims_limit = MEMBER_CLAIMS if newcomer else MEMBER_CLAIMS_SENIOR
        self._claimed_at = now
        self._claims += 1
        return self._claims >= self._claims_limit
