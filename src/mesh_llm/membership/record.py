"""What is said about a node: what it signed itself, and what others think of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import field, replace

from mesh_llm.errors import MalformedMessage, Misquoted
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.fact_documents import facts_from_document, facts_to_document
from mesh_llm.membership.member import Standing
from mesh_llm.types import NodeFacts, NodeId, Signed

RANK = {Standing.ALIVE: 0, Standing.SUSPECT: 1, Standing.DEAD: 2, Standing.LEFT: 3}
"""Of two things said about one incarnation the worse one counts; the node itself refutes by a new one."""
_FRAME_BYTES = 160
"""Of a record beside what was signed: id, numbers, keys."""


@frozen
class Record:
    node: NodeId
    incarnation: int
    """Grows with every start of the node, and whenever it refutes what is said about it."""
    sequence: int
    """Grows with every change of its facts."""
    standing: Standing
    """LEFT is the node's own word; suspicion and death are others', and only hints."""
    facts: NodeFacts
    left: bool = False
    """Whether it says itself that it left."""
    signed: Signed | None = field(default=None, compare=False, repr=False)
    """The node's own words for all of this but the standing; None of our own until it is told."""
    version: tuple[int, int, int] = field(init=False, compare=False, repr=False)
    gone: bool = field(init=False, compare=False, repr=False)
    _mark: int = field(init=False, default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Records are compared far more often than made.
        rank = RANK[self.standing]
        object.__setattr__(self, "version", (self.incarnation, rank, self.sequence))
        object.__setattr__(self, "gone", rank >= RANK[Standing.DEAD])

    @property
    def mark(self) -> int:
        """64 bits of who lives in which version, for digests."""
        if not self._mark:
            object.__setattr__(self, "_mark", _mark_of(self.node, self.version))
        return self._mark

    def said(self, standing: Standing) -> Record:
        return replace(self, standing=standing)


@frozen
class Told:
    """A record on its way: nothing in it is believed before what was signed has been verified.

    Without `signed` it is a hint about a record that the receiver has: the sender takes the node for
    suspect or dead. The numbers tell whether it is worth reading on.
    """

    node: NodeId
    incarnation: int
    sequence: int
    standing: Standing
    signed: Signed | None = None
    version: tuple[int, int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", (self.incarnation, RANK[self.standing], self.sequence))

    @property
    def size_bytes(self) -> int:
        return _FRAME_BYTES + (0 if self.signed is None else self.signed.size_bytes)

    def hint(self) -> Told:
        return replace(self, signed=None)


def told(record: Record) -> Told:
    standing = record.standing
    if standing is Standing.LEFT and not record.left:
        # Seen by us, and not signed by the node: to others it is no more than a hint.
        standing = Standing.DEAD
    return Told(
        node=record.node,
        incarnation=record.incarnation,
        sequence=record.sequence,
        standing=standing,
        signed=record.signed,
    )


# -- what a node signs ---------------------------------------------------------------------------


def record_text(record: Record) -> str:
    """What a node says about itself, to be signed."""
    document: dict[str, object] = {
        "id": record.node,
        "i": record.incarnation,
        "s": record.sequence,
        "facts": facts_to_document(record.facts),
    }
    if record.left:
        document["left"] = True
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def read_record(told: Told) -> Record:
    """What was signed, once its signature holds; `MalformedMessage` where it is something else.

    `Misquoted` where it may well be a record, and only what was told beside it is wrong.
    """
    assert told.signed is not None
    try:
        document = json.loads(told.signed.text)
    except (ValueError, RecursionError):
        raise MalformedMessage("record: what was signed is not JSON") from None
    fields = Fields(document, "record")
    left = fields.flag("left", False)
    if left is not (told.standing is Standing.LEFT):
        raise Misquoted("record: its node did not say whether it left")
    record = Record(
        node=fields.node("id"),
        incarnation=fields.whole("i"),
        sequence=fields.whole("s"),
        standing=told.standing,
        facts=facts_from_document(fields.get("facts")),
        left=left,
        signed=told.signed,
    )
    if (record.node, record.version) != (told.node, told.version):
        raise Misquoted("record: what was signed is another one")
    return record


def joined(old: Record, new: Record) -> Record:
    """Both together; the same whichever came first."""
    if new.incarnation != old.incarnation:
        return new if new.incarnation > old.incarnation else old
    later = new if new.sequence > old.sequence else old
    worse = max(old.standing, new.standing, key=RANK.__getitem__)
    return later if later.standing is worse else later.said(worse)


def newer(version: tuple[int, int, int], than: tuple[int, int, int]) -> bool:
    """Whether a record of `version` has something that one of `than` lacks."""
    if version[0] != than[0]:
        return version[0] > than[0]
    return version[1] > than[1] or version[2] > than[2]


def _mark_of(node: NodeId, version: tuple[int, int, int]) -> int:
    return int.from_bytes(hashlib.blake2b(f"{node} {version}".encode(), digest_size=8).digest(), "big")
