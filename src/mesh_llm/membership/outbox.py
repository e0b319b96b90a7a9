"""Effects of one step, and news on their way to the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from mesh_llm.membership.effects import Effect, Send
from mesh_llm.membership.messages import (
    ENTRY_LIMIT,
    NODES_LIMIT,
    RECORD_LIMIT,
    Entry,
    Message,
    Summary,
    Update,
    Want,
)
from mesh_llm.membership.record import Told
from mesh_llm.types import NodeId

MEMBER_MESSAGE_BYTES = 64 << 10
"""Of one message as JSON."""
MEMBER_FLUSH_S = 0.05
"""News leave at once, and those that follow within this leave together."""
_UNHURRIED = 500
"""Members up to which that holds for announcements, too."""
_ANNOUNCE_MOST_S = 0.5
"""A piece of news takes six hops through ten thousand members, and waits for half of this at each."""


_RECORD_BYTES = MEMBER_MESSAGE_BYTES - 4096
_UPDATES_LIMIT = 32
"""Messages in answer to one: two megabytes; what is missing then shows in the next comparison."""


def announce_s(members: int) -> float:
    """Between two announcements: the more members there are, the more news there are to tell together."""
    return min(_ANNOUNCE_MOST_S, MEMBER_FLUSH_S * max(1.0, members / _UNHURRIED))


class Outbox:
    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._news: dict[NodeId, NodeId | None] = {}
        self._flushed_at = self._announced_at = float("-inf")

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: NodeId, message: Message) -> None:
        self._effects.append(Send(to=to, message=message))

    def send_records(self, to: NodeId, records: Iterable[Told]) -> None:
        for message in updates(records)[:_UPDATES_LIMIT]:
            self.send(to, message)

    def ask(self, to: NodeId, nodes: list[NodeId]) -> None:
        if nodes:
            self.send(to, Want(nodes=tuple(nodes[:NODES_LIMIT])))

    def tell(self, node: NodeId, source: NodeId | None) -> None:
        """Have the ledger's record of `node` told to all neighbours but `source`."""
        self._news[node] = None if node in self._news and self._news[node] != source else source

    def flush(
        self,
        told: Callable[[NodeId], Told | Entry | None],
        neighbours: Collection[NodeId],
        now: float,
        members: int,
    ) -> None:
        """Tell the news, unless some were told a moment ago: then a later tick tells them together."""
        if not self._news or 0 <= now - self._flushed_at < MEMBER_FLUSH_S:
            return
        news, waiting = {node: told(node) for node in self._news}, dict[NodeId, NodeId | None]()
        if 0 <= now - self._announced_at < announce_s(members):
            waiting = {node: source for node, source in self._news.items() if isinstance(news[node], Entry)}
        records = {node: each for node, each in news.items() if each is not None and node not in waiting}
        self._tell(records, neighbours)
        if records:
            self._flushed_at = now
        if any(isinstance(each, Entry) for each in records.values()):
            self._announced_at = now
        self._news = waiting

    def _tell(self, records: Mapping[NodeId, Told | Entry], neighbours: Collection[NodeId]) -> None:
        sources = {self._news[node] for node in records}
        shared = _messages(records.values())
        for to in neighbours:
            fresh = shared
            if to in sources:
                fresh = _messages(record for node, record in records.items() if self._news[node] != to)
            for message in fresh:
                self.send(to, message)

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def _messages(news: Iterable[Told | Entry]) -> list[Message]:
    """Records as they are; the others are announced, in a summary of no bucket."""
    told, announced = [], []
    for each in news:
        if isinstance(each, Told):
            told.append(each)
        else:
            announced.append(each)
    parts = [tuple(announced[at : at + ENTRY_LIMIT]) for at in range(0, len(announced), ENTRY_LIMIT)]
    return [*updates(told), *(Summary(buckets=(), entries=part) for part in parts)]


def updates(records: Iterable[Told]) -> list[Update]:
    """In messages that are not too long."""
    found: list[Update] = []
    batch: list[Told] = []
    size_bytes = 0
    for told in records:
        if batch and (size_bytes + told.size_bytes > _RECORD_BYTES or len(batch) == RECORD_LIMIT):
            found.append(Update(records=tuple(batch)))
            batch, size_bytes = [], 0
        batch.append(told)
        size_bytes += told.size_bytes
    return [*found, Update(records=tuple(batch))] if batch else found
