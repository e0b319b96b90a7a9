"""What is said about every node, and digests of it.

Of one that is alive or suspected the record counts in the digests, so that two ledgers can tell
whether they agree. Tombstones do not: they are forgotten at different times at different places,
and are only brought up against somebody who takes the dead for living.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable

from mesh_llm.defaults import MEMBER_BUCKETS
from mesh_llm.membership.messages import Compare, Entry, Summary
from mesh_llm.membership.record import RANK, Record, joined, newer
from mesh_llm.types import NodeId


class RecordTable:
    def __init__(self) -> None:
        self._records: dict[NodeId, Record] = {}
        self._marks: dict[NodeId, int] = {}
        self._buckets = [0] * MEMBER_BUCKETS
        self._filed: dict[int, set[NodeId]] = {}
        self.ring: list[NodeId] = []
        """Those that are not gone, sorted."""
        self.digest = 0

    def __contains__(self, node: NodeId) -> bool:
        return node in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, node: NodeId) -> Record | None:
        return self._records.get(node)

    def nodes(self) -> list[NodeId]:
        return list(self._records)

    def put(self, record: Record) -> None:
        self._records[record.node] = record
        self._count(record.node, None if record.gone else record.mark)

    def remove(self, node: NodeId) -> None:
        self._records.pop(node, None)
        self._count(node, None)

    def _count(self, node: NodeId, new: int | None) -> None:
        """Have a node count in the digests with `new`; None takes it off the ring."""
        old, bucket = self._marks.pop(node, None), bucket_of(node)
        change = (old or 0) ^ (new or 0)
        self._buckets[bucket] ^= change
        self.digest ^= change
        if new is not None:
            self._marks[node] = new
        if old is None and new is not None:
            insort(self.ring, node)
            self._filed.setdefault(bucket, set()).add(node)
        elif old is not None and new is None:
            del self.ring[bisect_left(self.ring, node)]
            self._filed[bucket].discard(node)

    def lacks(self, node: NodeId, version: tuple[int, int, int]) -> bool:
        """Whether a record of that version would say something new here."""
        old = self._records.get(node)
        return old is None or newer(version, old.version)

    def news(self, record: Record) -> Record | None:
        """What would stand here with this record; None where it says nothing new."""
        old = self._records.get(record.node)
        if old is None:
            return record
        return joined(old, record) if newer(record.version, old.version) else None

    # -- comparing two ledgers ------------------------------------------------------------------

    def compare(self) -> Compare:
        return Compare(buckets=tuple((at, mark) for at, mark in enumerate(self._buckets) if mark))

    def differing(self, compare: Compare) -> list[int]:
        theirs = dict(compare.buckets)
        return [at for at, mark in enumerate(self._buckets) if mark != theirs.get(at, 0)]

    def summaries(self, buckets: Iterable[int], limit: int) -> list[Summary]:
        """In messages of at most `limit` entries."""
        found: list[Summary] = []
        numbers: list[int] = []
        entries: list[Entry] = []
        for bucket in buckets:
            here = [self.entry(node) for node in sorted(self._filed.get(bucket, ()))][:limit]
            if len(entries) + len(here) > limit:
                found.append(Summary(buckets=tuple(numbers), entries=tuple(entries)))
                numbers, entries = [], []
            numbers.append(bucket)
            entries += here
        return [*found, Summary(buckets=tuple(numbers), entries=tuple(entries))] if numbers else found

    def entry(self, node: NodeId) -> Entry:
        record = self._records[node]
        return Entry(
            node=node,
            incarnation=record.incarnation,
            standing=record.standing,
            sequence=record.sequence,
        )

    def reply(self, summary: Summary) -> tuple[list[Record], list[NodeId]]:
        """What the sender of a summary lacks, and what it has that is lacking here."""
        give: list[Record] = []
        want: list[NodeId] = []
        named = {entry.node for entry in summary.entries}
        for entry in summary.entries:
            mine = self._records.get(entry.node)
            theirs = (entry.incarnation, RANK[entry.standing], entry.sequence)
            if mine is None or newer(theirs, mine.version):
                want.append(entry.node)
            if mine is not None and newer(mine.version, theirs):
                give.append(mine)
        for bucket in summary.buckets:
            lacking = self._filed.get(bucket, set()) - named
            give += [self._records[node] for node in sorted(lacking)]
        return give, want


def bucket_of(node: NodeId) -> int:
    return zlib.crc32(node.encode()) % MEMBER_BUCKETS
