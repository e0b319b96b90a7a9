"""What members say to each other, and its form as JSON documents.

Every message stands for itself and may be lost: pings carry digests, and what is missing shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mesh_llm.defaults import MEMBER_BUCKETS
from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.facts import facts_from_document, facts_to_document
from mesh_llm.membership.fields import Fields, node_id
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Record
from mesh_llm.types import NodeId

RECORD_LIMIT = 256
ENTRY_LIMIT = 512
"""Of 100 bytes each."""
NODES_LIMIT = 512
_HASH_MOST = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    number: int
    incarnation: int
    """The sender's own."""
    digest: int
    """Of its ledger."""
    hears: int
    """A digest of those it hears."""
    keep: bool
    """Whether it wants the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    number: int
    incarnation: int
    digest: int
    ask: bool = False
    """For `Hears`: the ping's digest is not of what was told last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hears:
    """Whom the sender hears on connections of its own."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Digests of the sender's ledger by bucket; empty buckets are left out."""

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record's version, without its facts."""

    node: NodeId
    incarnation: int
    standing: Standing
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All that the sender's ledger has in some buckets."""

    buckets: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Asks for records."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The sender goes, and means to."""

    incarnation: int


Message = Ping | Ack | Hears | Update | Compare | Summary | Want | Leave


def to_document(message: Message) -> dict[str, object]:
    match message:
        case Ping():
            return {
                "kind": "ping",
                "n": message.number,
                "i": message.incarnation,
                "d": message.digest,
                "h": message.hears,
                "k": message.keep,
            }
        case Ack():
            document: dict[str, object] = {"kind": "ack", "n": message.number, "i": message.incarnation}
            document["d"] = message.digest
            return {**document, "ask": True} if message.ask else document
        case Hears():
            return {"kind": "hears", "nodes": list(message.nodes)}
        case Update():
            return {"kind": "update", "records": [record_to_document(record) for record in message.records]}
        case Compare():
            return {"kind": "compare", "buckets": [list(bucket) for bucket in message.buckets]}
        case Summary():
            entries = [[e.node, e.incarnation, e.standing.value, e.sequence] for e in message.entries]
            return {"kind": "summary", "buckets": list(message.buckets), "entries": entries}
        case Want():
            return {"kind": "want", "nodes": list(message.nodes)}
        case Leave():
            return {"kind": "leave", "i": message.incarnation}


def from_document(document: object) -> Message:
    """Raises MalformedMessage for everything that `to_document` does not write."""
    fields = Fields(document, "message")
    kind = fields.text("kind", 16)
    reader = _READERS.get(kind)
    if reader is None:
        raise MalformedMessage(f"a message of an unknown kind, {kind!r}")
    return reader(fields)


def record_to_document(record: Record) -> dict[str, object]:
    document: dict[str, object] = {"id": record.node, "i": record.incarnation, "s": record.sequence}
    if record.standing is not Standing.ALIVE:
        document["is"] = record.standing.value
    if record.facts is not None:
        document["facts"] = facts_to_document(record.facts)
    return document


def record_from_document(document: object) -> Record:
    fields = Fields(document, "record")
    record = Record(
        node=fields.node("id"),
        incarnation=fields.whole("i"),
        sequence=fields.whole("s"),
        standing=fields.word("is", Standing, Standing.ALIVE),
        facts=facts_from_document(fields.get("facts")) if fields.has("facts") else None,
    )
    if record.facts is None and record.standing is Standing.ALIVE:
        raise MalformedMessage("record: of one that is alive, without facts")
    return record


def _ping(fields: Fields) -> Ping:
    return Ping(
        number=fields.whole("n"),
        incarnation=fields.whole("i"),
        digest=fields.whole("d", most=_HASH_MOST),
        hears=fields.whole("h", most=_HASH_MOST),
        keep=fields.flag("k"),
    )


def _ack(fields: Fields) -> Ack:
    return Ack(
        number=fields.whole("n"),
        incarnation=fields.whole("i"),
        digest=fields.whole("d", most=_HASH_MOST),
        ask=fields.flag("ask", False),
    )


def _bucket_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MEMBER_BUCKETS:
        raise MalformedMessage("buckets: not the number of a bucket")
    return value


def _bucket(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedMessage("buckets: not a number and a digest")
    return _bucket_number(value[0]), Fields({"d": value[1]}, "buckets").whole("d", most=_HASH_MOST)


def _entry(value: object) -> Entry:
    if not isinstance(value, list) or len(value) != 4:
        raise MalformedMessage("entries: not an id, a standing and two numbers")
    fields = Fields(dict(zip(("node", "i", "is", "s"), value, strict=True)), "entry")
    return Entry(
        node=fields.node("node"),
        incarnation=fields.whole("i"),
        standing=fields.word("is", Standing),
        sequence=fields.whole("s"),
    )


_READERS: dict[str, Callable[[Fields], Message]] = {
    "ping": _ping,
    "ack": _ack,
    "hears": lambda fields: Hears(nodes=fields.items("nodes", NODES_LIMIT, node_id)),
    "update": lambda fields: Update(records=fields.items("records", RECORD_LIMIT, record_from_document)),
    "compare": lambda fields: Compare(buckets=fields.items("buckets", MEMBER_BUCKETS, _bucket)),
    "summary": lambda fields: Summary(
        buckets=fields.items("buckets", MEMBER_BUCKETS, _bucket_number),
        entries=fields.items("entries", ENTRY_LIMIT, _entry),
    ),
    "want": lambda fields: Want(nodes=fields.items("nodes", NODES_LIMIT, node_id)),
    "leave": lambda fields: Leave(incarnation=fields.whole("i")),
}
