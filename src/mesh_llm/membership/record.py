"""What is said about a node: whether it lives, and its facts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace

from mesh_llm.membership.facts import facts_to_document
from mesh_llm.membership.member import Standing
from mesh_llm.types import NodeFacts, NodeId

RANK = {Standing.ALIVE: 0, Standing.SUSPECT: 1, Standing.DEAD: 2, Standing.LEFT: 3}
"""Of two things said about one incarnation the worse one counts; the node itself refutes by a new one."""
_FRAME_BYTES = 160
"""Of a record beside its facts: id, numbers, keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    node: NodeId
    incarnation: int
    """Grows with every start of the node, and whenever it refutes what is said about it."""
    sequence: int
    """Grows with every change of its facts."""
    standing: Standing
    facts: NodeFacts | None = None
    """Never None for one that is alive."""
    size_bytes: int = field(default=0, compare=False)
    """As JSON, roughly; counted once."""
    version: tuple[int, int, int] = field(init=False, compare=False, repr=False)
    gone: bool = field(init=False, compare=False, repr=False)
    _mark: int = field(init=False, default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Records are compared far more often than made.
        rank = RANK[self.standing]
        object.__setattr__(self, "version", (self.incarnation, rank, self.sequence))
        object.__setattr__(self, "gone", rank >= RANK[Standing.DEAD])
        if not self.size_bytes:
            object.__setattr__(self, "size_bytes", _FRAME_BYTES + facts_bytes(self.facts))

    @property
    def mark(self) -> int:
        """64 bits of who lives in which version, for digests."""
        if not self._mark:
            text = f"{self.node} {self.version}".encode()
            mark = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            object.__setattr__(self, "_mark", mark)
        return self._mark

    def said(self, standing: Standing) -> Record:
        return replace(self, standing=standing)

    def bare(self) -> Record:
        """Without facts: all that has to be known of one that is gone."""
        return replace(self, facts=None, size_bytes=_FRAME_BYTES)


def facts_bytes(facts: NodeFacts | None) -> int:
    return 0 if facts is None else len(json.dumps(facts_to_document(facts), separators=(",", ":")))


def joined(old: Record, new: Record) -> Record:
    """Both together; the same whichever came first."""
    if new.incarnation != old.incarnation:
        later, earlier = (new, old) if new.incarnation > old.incarnation else (old, new)
        if later.facts is None and earlier.facts is not None:
            return replace(later, facts=earlier.facts, size_bytes=earlier.size_bytes)
        return later
    facts = new if (new.facts is not None, new.sequence) > (old.facts is not None, old.sequence) else old
    worse = max(old.standing, new.standing, key=RANK.__getitem__)
    return facts if facts.standing is worse else facts.said(worse)
