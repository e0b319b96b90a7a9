"""The modelled members of a mesh: one table for all of them, and when news reach whom.

How a piece of news travels is worked out over the same ring and chords that views keep, with drawn delays,
as fast as views pass it on. A modelled member knows it from its arrival on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil

from mesh_llm.lab.simulate.distributions import DrawnNode, delay_s
from mesh_llm.lab.simulate.signing import seal
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import Message, Summary, Update
from mesh_llm.membership.outbox import announce_s
from mesh_llm.membership.record import Record, record_text, told
from mesh_llm.membership.record_table import RecordTable
from mesh_llm.membership.ring import chosen
from mesh_llm.types import NodeId

HANDLING_S = 0.03
"""For each hop: news that follow others within 50 ms wait for them."""
FORGET_S = 10.0
"""After which a piece of news has long reached everybody."""


@dataclass(slots=True, kw_only=True)
class TravellingNews:
    """A change of one record: who hears of it when and from whom, and what that changes in a digest."""

    record: Record
    change: int
    begun: float
    arrives: dict[NodeId, float]
    source: dict[NodeId, NodeId]

    def told(self) -> Message:
        """As its node tells it itself, and a death."""
        note = told(self.record)
        return Update(records=(note.hint() if note.standing is Standing.DEAD else note,))


class ModelledMembers:
    def __init__(self, nodes: Iterable[DrawnNode]) -> None:
        self.table = RecordTable()
        """What is true; each knows it but for the news that have not arrived there."""
        self.nodes = {node.id: node for node in nodes}
        self.edges: dict[NodeId, set[NodeId]] = defaultdict(set)
        self.news: list[TravellingNews] = []
        self._delays: dict[tuple[NodeId, NodeId], float] = {}
        for node in self.nodes.values():
            self.table.put(signed_record(node))
        for id in list(self.table.ring):
            self._connect(id)

    def alive(self, id: NodeId) -> bool:
        record = self.table.get(id)
        return record is not None and not record.gone

    def delay_s(self, one: NodeId, other: NodeId) -> float:
        key = (one, other)
        if key not in self._delays:
            self._delays[key] = delay_s(self.nodes[one], self.nodes[other])
        return self._delays[key]

    def hears(self, id: NodeId) -> tuple[NodeId, ...]:
        return tuple(sorted(other for other in self.edges[id] if self.alive(other)))

    def incarnation(self, id: NodeId) -> int:
        record = self.table.get(id)
        return record.incarnation if record else 1

    def digest(self, id: NodeId, now: float) -> int:
        digest = self.table.digest
        for news in self.news:
            if news.arrives.get(id, news.begun) > now:
                digest ^= news.change
        return digest

    def source(self, subject: NodeId, me: NodeId) -> NodeId | None:
        """Who tells `me` of the last change of a record."""
        last = next((news for news in reversed(self.news) if news.record.node == subject), None)
        return last.source.get(me) if last else None

    def announcement(self, subjects: Iterable[NodeId]) -> Summary:
        """As others pass news on."""
        entries = tuple(self.table.entry(subject) for subject in subjects if subject in self.table)
        return Summary(buckets=(), entries=entries)

    def announces_at(self, id: NodeId, at: float) -> float:
        """When a member that hears of something announces it, together with what else it has heard."""
        pause_s = announce_s(len(self.table.ring))
        phase_s = pause_s * (int(id[:8], 16) / (1 << 32))
        return ceil((at - phase_s) / pause_s) * pause_s + phase_s

    # -- changes --------------------------------------------------------------------------------

    def add(self, node: DrawnNode, now: float) -> TravellingNews:
        self.nodes[node.id] = node
        self._connect(node.id)
        return self.spread(signed_record(node), {node.id}, now)

    def remove(self, id: NodeId) -> None:
        """Its connections close, and those who had them look for others."""
        for other in self.edges.pop(id, set()):
            self.edges[other].discard(id)
            if self.alive(other):
                self._connect(other)

    def _connect(self, id: NodeId) -> None:
        ring = self.table.ring if id in self.table else sorted((*self.table.ring, id))
        for other in chosen(id, ring):
            self.edges[id].add(other)
            self.edges[other].add(id)

    def spread(self, record: Record, origins: Collection[NodeId], now: float) -> TravellingNews:
        """A change of a record becomes known, at first to its origins."""
        before = self.table.get(record.node)
        change = (before.mark if before and not before.gone else 0) ^ (0 if record.gone else record.mark)
        self.table.put(record)
        arrives, source = self._travel(origins, now, hint=record.gone)
        news = TravellingNews(record=record, change=change, begun=now, arrives=arrives, source=source)
        self.news = [*(each for each in self.news if now - each.begun < FORGET_S), news]
        return news

    def _travel(
        self, origins: Collection[NodeId], now: float, *, hint: bool
    ) -> tuple[dict[NodeId, float], dict[NodeId, NodeId]]:
        """When a change that these know now reaches whom, and from whom. Records are announced, asked for and
        sent: three ways for each hop but the first; hints take one."""
        arrives: dict[NodeId, float] = {}
        source: dict[NodeId, NodeId] = {}
        queue = [(now, origin, origin) for origin in origins]
        while queue:
            at, id, by = heappop(queue)
            if id in arrives:
                continue
            arrives[id] = at
            source[id] = by
            quick = hint or id in origins
            leaves, ways = (at, 1) if quick else (self.announces_at(id, at), 3)
            for other in self.edges[id]:
                if other not in arrives and self.alive(other):
                    heappush(queue, (leaves + ways * self.delay_s(id, other) + HANDLING_S, other, id))
        return arrives, source


def signed_record(node: DrawnNode) -> Record:
    return sealed(Record(node=node.id, incarnation=1, sequence=0, standing=Standing.ALIVE, facts=node.facts))


def sealed(record: Record) -> Record:
    return replace(record, signed=seal(record_text(record)))
