"""What members say to each other, and its form as JSON documents.

Every message stands for itself and may be lost: pings carry digests, and what is missing shows.
"""

from __future__ import annotations

from typing import Any

from mesh_llm.defaults import MEMBER_BUCKETS
from mesh_llm.errors import MalformedMessage
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import Fields, node_id
from mesh_llm.membership.document_shapes import FLAG, Shape, inner, items, text, whole, word
from mesh_llm.membership.member import Standing
from mesh_llm.membership.record import Told
from mesh_llm.mesh_settings import MODELS_LIMIT
from mesh_llm.sanitise import NAME_CHARS
from mesh_llm.types import Fingerprint, NodeId, Signed, State

RECORD_LIMIT = 256
ENTRY_LIMIT = 512
"""Of 100 bytes each."""
NODES_LIMIT = 512
_HASH_MOST = (1 << 64) - 1
_TEXT_BYTES = 48 << 10
"""Of what a node signs: its facts, and a little more; escaped it still fits into a frame."""
_SIGNATURE_CHARS = 96
_CREDENTIAL_CHARS = 2048
_REASON_CHARS = 400


@frozen
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


@frozen
class Ack:
    number: int
    incarnation: int
    digest: int
    ask: bool = False
    """For `Hears`: the ping's digest is not of what was told last."""


@frozen
class Hears:
    """Whom the sender hears on connections of its own."""

    nodes: tuple[NodeId, ...]


@frozen
class Update:
    records: tuple[Told, ...]


@frozen
class Compare:
    """Digests of the sender's ledger by bucket; empty buckets are left out."""

    buckets: tuple[tuple[int, int], ...]


@frozen
class Entry:
    """A record's version, without its facts."""

    node: NodeId
    incarnation: int
    standing: Standing
    sequence: int


@frozen
class Summary:
    """All that the sender's ledger has in some buckets."""

    buckets: tuple[int, ...]
    entries: tuple[Entry, ...]


@frozen
class Want:
    """Asks for records."""

    nodes: tuple[NodeId, ...]


@frozen
class Leave:
    """The sender goes, and means to: its own record, which says so."""

    record: Told


@frozen
class GuestMessage:
    """What a lite client says of itself, to those that it is connected to and nobody else."""

    name: str
    version: str
    state: State
    reason: str
    wanted: tuple[Fingerprint, ...] = ()
    """Models on demand that its clients wait for."""


Message = Ping | Ack | Hears | Update | Compare | Summary | Want | Leave | GuestMessage


def told_to_document(told: Told) -> dict[str, object]:
    document: dict[str, object] = {"id": told.node, "i": told.incarnation, "s": told.sequence}
    if told.standing is not Standing.ALIVE:
        document["is"] = told.standing.value
    return document if told.signed is None else document | signed_to_document(told.signed)


def told_from_document(document: object) -> Told:
    fields = Fields(document, "record")
    told = Told(
        node=fields.node("id"),
        incarnation=fields.whole("i"),
        sequence=fields.whole("s"),
        standing=fields.word("is", Standing, Standing.ALIVE),
        signed=signed_from_fields(fields) if fields.has("text") else None,
    )
    if told.signed is None and told.standing in (Standing.ALIVE, Standing.LEFT):
        raise MalformedMessage("record: only a node itself can say that it lives, or that it left")
    return told


def signed_to_document(signed: Signed) -> dict[str, object]:
    return {"text": signed.text, "signature": signed.signature, "credential": signed.credential}


def signed_from_fields(fields: Fields) -> Signed:
    """Its shape alone; whether it holds is for `transport.claims` to say."""
    return Signed(
        text=fields.raw("text", _TEXT_BYTES),
        signature=fields.text("signature", _SIGNATURE_CHARS),
        credential=fields.text("credential", _CREDENTIAL_CHARS),
    )


def _bucket_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MEMBER_BUCKETS:
        raise MalformedMessage("buckets: not the number of a bucket")
    return value


def _fingerprint(value: object) -> Fingerprint:
    return Fingerprint(Fields({"fingerprint": value}, "wanted").text("fingerprint", NAME_CHARS))


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


def _entry_to_document(entry: Entry) -> object:
    return [entry.node, entry.incarnation, entry.standing.value, entry.sequence]


_NODES = items(NODES_LIMIT, node_id, str)
_NUMBER = whole().called("n")
_INCARNATION = whole().called("i")
_HASH = whole(_HASH_MOST)
_SHAPES: dict[str, Shape[Any]] = {
    "ping": Shape(
        Ping,
        "message",
        number=_NUMBER,
        incarnation=_INCARNATION,
        digest=_HASH.called("d"),
        hears=_HASH.called("h"),
        keep=FLAG.called("k"),
    ),
    "ack": Shape(
        Ack,
        "message",
        terse=True,
        number=_NUMBER,
        incarnation=_INCARNATION,
        digest=_HASH.called("d"),
        ask=FLAG,
    ),
    "hears": Shape(Hears, "message", nodes=_NODES),
    "update": Shape(Update, "message", records=items(RECORD_LIMIT, told_from_document, told_to_document)),
    "compare": Shape(Compare, "message", buckets=items(MEMBER_BUCKETS, _bucket, list)),
    "summary": Shape(
        Summary,
        "message",
        buckets=items(MEMBER_BUCKETS, _bucket_number, int),
        entries=items(ENTRY_LIMIT, _entry, _entry_to_document),
    ),
    "want": Shape(Want, "message", nodes=_NODES),
    "leave": Shape(Leave, "message", record=inner(told_from_document, told_to_document)),
    "guest": Shape(
        GuestMessage,
        "message",
        terse=True,
        name=text(NAME_CHARS),
        version=text(NAME_CHARS),
        state=word(State),
        reason=text(_REASON_CHARS),
        wanted=items(MODELS_LIMIT, _fingerprint, str),
    ),
}
_KINDS = {shape.kind: kind for kind, shape in _SHAPES.items()}


def to_document(message: Message) -> dict[str, object]:
    kind = _KINDS[type(message)]
    return {"kind": kind, **_SHAPES[kind].write(message)}


def from_document(document: object) -> Message:
    """Raises MalformedMessage for everything that `to_document` does not write."""
    kind = Fields(document, "message").text("kind", 16)
    if kind not in _SHAPES:
        raise MalformedMessage(f"a message of an unknown kind, {kind!r}")
    message: Message = _SHAPES[kind].read(document)
    return message
