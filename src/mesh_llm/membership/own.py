"""This node's own record: nobody else may have the last word about it."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from mesh_llm.defaults import MEMBER_CLAIMS, MEMBER_CLAIMS_S, MEMBER_CLAIMS_SENIOR
from mesh_llm.membership.fields import WHOLE_LIMIT
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record
from mesh_llm.types import NodeFacts

COPIED_HOME = "another machine runs with a copy of this node's home"


class Verdict(Enum):
    FINE = 0
    REFUTED = 1
    COPIED = 2


class Own:
    def __init__(self, record: Record) -> None:
        self.record = record
        self._claims = 0
        self._claims_limit = MEMBER_CLAIMS
        self._claimed_at = float("-inf")

    @property
    def left(self) -> bool:
        return self.record.standing is Standing.LEFT

    def publish(self, facts: NodeFacts) -> bool:
        if facts == self.record.facts:
            return False
        self.record = replace(self.record, facts=facts, sequence=self.record.sequence + 1, size_bytes=0)
        return True

    def leave(self) -> None:
        self.record = self.record.said(Standing.LEFT)

    def heard(self, said: Record, now: float) -> Verdict:
        """Something that others say about this node."""
        mine = self.record
        foreign = (said.incarnation, said.sequence) > (mine.incarnation, mine.sequence)
        claimed = foreign and said.standing is Standing.ALIVE
        wronged = said.standing is not Standing.ALIVE and said.incarnation >= mine.incarnation
        if self.left or not (claimed or wronged):
            return Verdict.FINE
        if claimed and self._too_often(said, now):
            return Verdict.COPIED
        if said.incarnation >= WHOLE_LIMIT:
            # Nobody counts that far: there is no way to be heard again under this id.
            return Verdict.COPIED
        self.record = replace(mine, incarnation=said.incarnation + 1)
        return Verdict.REFUTED

    def _too_often(self, said: Record, now: float) -> bool:
        if abs(now - self._claimed_at) > MEMBER_CLAIMS_S:
            self._claims = 0
            # Refuted by exactly one, we are the newcomer; an incarnation far from ours is a newcomer's.
            newcomer = said.incarnation == self.record.incarnation + 1
            self._claims_limit = MEMBER_CLAIMS if newcomer else MEMBER_CLAIMS_SENIOR
        self._claimed_at = now
        self._claims += 1
        return self._claims >= self._claims_limit
