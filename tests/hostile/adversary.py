"""A member that keeps to no rules, on the project's own transport.

All that these tests know of the wire is in this file: the documents of messages, the headers of streams,
the codes of closings. Where one of them changes, this is the place.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.errors import MeshError, PeerLost
from mesh_llm.models.digests import Digests
from mesh_llm.models.offer import Offers
from mesh_llm.models.throttle import Throttle
from mesh_llm.transport.closing import Code, close
from mesh_llm.transport.endpoint import address_of, bind
from mesh_llm.transport.framing import FRAME_VERSION, HEAD, LENGTH, FrameType
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import decode
from mesh_llm.transport.network import Membership, Network, NetworkConfig, Peer, Stream
from mesh_llm.transport.quic import iroh
from mesh_llm.types import Address, Fingerprint, NodeId, Role
from tests.support.background import WITHIN_S, Background
from tests.support.members import new_identity
from tests.support.waiting import until

LARGEST = (1 << 53) - 1
"""The largest number that a message may carry."""
READ_BYTES = 1 << 16

Serve = Callable[[NodeId, dict[str, Any], Stream], Awaitable[None]]


class Adversary:
    """Joins with a token, and says what it likes. Methods block; its answers to pings do not wait for them.

    `to` is a node's id; where it is left out, the one that let it in.
    """

    def __init__(self, loop: Background, *, name: str = "mallory", identity: Identity | None = None) -> None:
        self._loop = loop
        self.name = name
        self.identity = identity or new_identity()
        self.id = self.identity.id
        self.handler = _Handler(self)
        self.incarnation = int(time.time() * 1000) * 1000
        self.sequence = 0
        self.role = Role.NODE
        self.inviter = NodeId("")
        self.membership = Membership()
        self.network = Network(self._config(), self.membership, self.handler)
        self._door: _Door | None = None
        loop.run(self.network.start())

    def _config(self) -> NetworkConfig:
        return NetworkConfig(identity=self.identity, bind_ip="127.0.0.1", no_relay=True)

    # -- life ------------------------------------------------------------------------------------

    def join(self, token: str, *, timeout_s: float = WITHIN_S) -> Adversary:
        """As whatever the token makes of it; JoinRefused where it is not let in."""
        invite = decode(token)
        self._loop.run(self.network.join(invite, timeout_s=timeout_s), within_s=timeout_s + WITHIN_S)
        self.role, self.inviter = invite.role, invite.inviter
        return self

    def connect(self, node: NodeId, address: Address) -> None:
        """To another member, by its credential."""
        self._loop.run(self.network.connect(node, address))

    def end(self) -> None:
        """Says that it stops."""
        if self._door is not None:
            self._loop.run(self._door.close())
        self._loop.run(self.network.close())

    def open_door(self, code: Code) -> dict[str, Any]:
        """A place, as a record names it, where everybody who dials it is told `code` in the handshake."""
        self._door = _Door(self._config(), code)
        self._loop.run(self._door.open())
        return self.place(self._door.address.direct[0])

    @property
    def dialled(self) -> int:
        """How often others came to be refused."""
        return self._door.dialled if self._door is not None else 0

    @property
    def connected(self) -> bool:
        return bool(self.network.peers)

    # -- what it says ----------------------------------------------------------------------------

    def peer(self, to: NodeId | None = None) -> Peer:
        return self.network.peers[to or self.inviter]

    def send(self, *bodies: dict[str, Any], to: NodeId | None = None) -> None:
        """Control messages, whatever is in them."""

        def all_of_them() -> None:
            for body in bodies:
                self.peer(to).send(body)

        self._loop.call(all_of_them)

    def close(self, code: Code, *, to: NodeId | None = None) -> None:
        self._loop.call(self.peer(to).end, code)

    def open(self, kind: str, header: dict[str, Any], *, to: NodeId | None = None) -> Opened:
        return Opened(self._loop, self._loop.run(self.peer(to).open(kind, header)))

    def send_text(self, text: bytes, *, to: NodeId | None = None) -> None:
        """A control message as it is, whether or not an honest node could have written it."""
        frame = HEAD.pack(len(text), FRAME_VERSION, FrameType.MESSAGE) + text
        # Behind what waits to be sent: the queue is the only way in between two frames.
        self._loop.call(self.peer(to)._enqueue, frame)

    def open_text(self, texts: Sequence[bytes], *, data: bytes = b"", within_s: float = 0.3) -> None:
        """Streams that begin with these, all at once; their answers are read for so long, then they break."""
        self._loop.run(self._open_text(texts, data, within_s))

    async def _open_text(self, texts: Sequence[bytes], data: bytes, within_s: float) -> None:
        peer = self.peer()

        async def one(text: bytes) -> None:
            stream = Stream(await peer._connection.open_bi(), peer._spawn)
            with suppress(MeshError, TimeoutError):
                async with asyncio.timeout(within_s):
                    await stream.write(LENGTH.pack(len(text)) + text + data)
                    while await stream.read(READ_BYTES):
                        pass
            stream.reset()

        with suppress(iroh().IrohError):
            await asyncio.gather(*(one(text) for text in texts))

    def settle(self, to: NodeId | None = None, *, within_s: float = WITHIN_S) -> None:
        """Until all that it sent before has been read over there: a ping goes the same way."""
        number = secrets.randbelow(LARGEST)
        self.send(self.ping(number), to=to)
        answered = self.handler.acks
        until(lambda: number in answered, within_s=within_s, what="its ping is answered")

    def tell(self, *records: dict[str, Any], to: NodeId | None = None) -> None:
        """As a member that passes on what it heard, and wait until it was read."""
        self.send({"kind": "update", "records": list(records)}, to=to)
        self.settle(to)

    def claim(self, record: dict[str, Any], *, to: NodeId | None = None) -> None:
        """The same, without a look at what becomes of it."""
        self.send({"kind": "update", "records": [record]}, to=to)

    def introduce(self, *, to: NodeId | None = None, settle: bool = True, **facts: Any) -> None:
        """Its own record, as every member has one."""
        self.sequence += 1
        self.send({"kind": "update", "records": [self.record(facts=self.facts(**facts))]}, to=to)
        if settle:
            self.settle(to)

    # -- documents -------------------------------------------------------------------------------

    def ping(self, number: int) -> dict[str, Any]:
        return {"kind": "ping", "n": number, "i": self.incarnation, "d": 0, "h": 0, "k": True}

    def ack(self, ping: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "ack", "n": ping.get("n"), "i": self.incarnation, "d": ping.get("d")}

    def record(
        self,
        node: NodeId | None = None,
        *,
        facts: dict[str, Any] | None = None,
        incarnation: int | None = None,
        sequence: int | None = None,
        standing: str | None = None,
    ) -> dict[str, Any]:
        """What is said about a node; about itself where none is named."""
        document: dict[str, Any] = {
            "id": node or self.id,
            "i": self.incarnation if incarnation is None else incarnation,
            "s": self.sequence if sequence is None else sequence,
        }
        document |= {"is": standing} if standing is not None else {}
        return document | ({"facts": facts} if facts is not None else {})

    def facts(self, **more: Any) -> dict[str, Any]:
        """A member that lends nothing, unless `more` says otherwise."""
        return {
            "name": self.name,
            "role": self.role.value,
            "version": __version__,
            "engine": ENGINE_VERSION,
            "state": "waiting",
            "address": self.place(self.network.address.direct[0]),
            **more,
        }

    def altered(self, node: NodeId, *, ahead: int = 1000, **facts: Any) -> dict[str, Any]:
        """Another one's last record, with other facts, as if that one had said so later."""
        theirs = self.record_of(node)
        incarnation, sequence = self.version_of(node)
        changed = {**theirs["facts"], **facts}
        return self.record(node, incarnation=incarnation, sequence=sequence + ahead, facts=changed)

    @staticmethod
    def place(address: str) -> dict[str, Any]:
        """`IP:PORT`, as the address in a record."""
        return {"direct": [address]}

    @staticmethod
    def held(fingerprint: str, name: str, size_bytes: int) -> dict[str, Any]:
        """A model, as a record lists it."""
        return {"fingerprint": fingerprint, "name": name, "size_bytes": size_bytes}

    def serving(self, *, epoch: int, layers: int, settings_version: int = 1) -> dict[str, Any]:
        """A plan, as one that hosts all of it publishes it."""
        stage = {
            "node": self.id,
            "first": 0,
            "last": layers,
            "weight_bytes": 1,
            "need_bytes": 1,
            "share": 1.0,
        }
        plan = {
            "mode": "solo",
            "host": self.id,
            "stages": [stage],
            "context": 512,
            "slots": 1,
            "head_on_worker": False,
            "need_bytes": 1,
            "have_bytes": 1,
            "predicted": None,
            "excluded": [],
            "reason": "it says so",
        }
        return {"epoch": epoch, "plan": plan, "settings_version": settings_version}

    @staticmethod
    def revocations(invites: list[str], expelled: list[NodeId] | None = None) -> dict[str, Any]:
        return {"revoked": invites, "expelled": expelled or []}

    def messages(self, other: NodeId) -> dict[str, dict[str, Any]]:
        """A message of each kind, as if from an honest node; those about others say what hurts `other`."""
        incarnation, sequence = self.version_of(other)
        dead = self.record(other, incarnation=incarnation, sequence=sequence, standing="dead")
        records = [self.record(facts=self._all_facts(other)), dead, self.altered(other)]
        entries = [[self.id, self.incarnation, "alive", 1], [other, incarnation, "dead", sequence]]
        return {
            "ping": self.ping(7),
            "ack": self.ack({"n": 7, "d": 1}) | {"ask": True},
            "hears": {"kind": "hears", "nodes": [other]},
            "update": {"kind": "update", "records": records},
            "compare": {"kind": "compare", "buckets": [[0, 1], [5, 77]]},
            "summary": {"kind": "summary", "buckets": [0, 5], "entries": entries},
            "want": {"kind": "want", "nodes": [self.id, other]},
            "leave": {"kind": "leave", "i": self.incarnation},
            "revocations": self.revocations(["00" * 8, "ab" * 8], [other]),
        }

    def _all_facts(self, other: NodeId) -> dict[str, Any]:
        gpu = {"name": "g", "description": "d", "kind": "gpu", "free_bytes": 1, "total_bytes": 2}
        return self.facts(
            memory_bytes=1,
            cores=1,
            gpus=[gpu],
            models=[{"fingerprint": "ab", "name": "other", "size_bytes": 1}],
            part={"fingerprint": "ab", "spans": [[0, 2]]},
            links=[{"node": other, "kind": "quic", "rtt_s": 0.001}],
            speed={"read": 1.0, "flops": 1.0, "attention": 1.0},
        )

    def streams(self, other: NodeId, *, epoch: int, fingerprint: str) -> dict[str, dict[str, Any]]:
        """The first document of a stream of each kind."""
        session = {"kind": "session", "epoch": epoch}
        headers: dict[str, dict[str, Any]] = {
            "http": self.to_http(epoch) | {"name": "n", "resumed": False, "within_s": 1.0},
            "serving": self.to_serving(epoch) | {"samples_since": 0.0},
            "introduce": {"epoch": epoch, "number": 1, "next": other},
            "lease": self.to_lease(fingerprint, epoch=epoch),
            "link": {"way": "quic", "purpose": session, "ticket": "00" * 32},
            "file": self.to_bytes(fingerprint, size_bytes=1) | {"ask": "ranges", "ranges": [[0, 1]]},
        }
        inner = {"kind": "serving", "header": {"epoch": epoch}}
        headers |= {"forward": {"to": other, **inner}}
        headers |= {"forwarded": self.to_forwarded(other, "serving", self.to_serving(epoch))}
        return {kind: {"kind": kind, "header": header} for kind, header in headers.items()}

    # -- headers of streams ----------------------------------------------------------------------

    @staticmethod
    def to_http(epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "client": "x"}

    @staticmethod
    def to_serving(epoch: int) -> dict[str, Any]:
        return {"epoch": epoch}

    @staticmethod
    def to_lease(fingerprint: str, *, epoch: int = 1) -> dict[str, Any]:
        return {"epoch": epoch, "fingerprint": fingerprint, "first": 0, "last": 1, "need_bytes": 1}

    @staticmethod
    def to_manifest(fingerprint: str) -> dict[str, Any]:
        return {"ask": "manifest", "fingerprint": fingerprint}

    @staticmethod
    def to_bytes(fingerprint: str, *, size_bytes: int) -> dict[str, Any]:
        part = {"file": 0, "size": size_bytes, "offset": 0, "length": 1}
        return {"ask": "bytes", "fingerprint": fingerprint, **part}

    @staticmethod
    def to_forwarded(origin: NodeId, kind: str, header: dict[str, Any]) -> dict[str, Any]:
        return {"origin": origin, "kind": kind, "header": header}

    # -- what it hears ---------------------------------------------------------------------------

    def heard(self) -> list[dict[str, Any]]:
        """Every message so far."""
        return [body for _, body in self.handler.messages]

    def record_of(self, node: NodeId, *, needs: str | None = None) -> dict[str, Any]:
        """The record of `node` as it is told when it asks; waits until the facts have what it `needs`."""

        def told() -> dict[str, Any] | None:
            self.handler.records.pop(node, None)
            self.send({"kind": "want", "nodes": [node]})
            until(lambda: node in self.handler.records, within_s=WITHIN_S, what="a record of it comes")
            record = self.handler.records[node]
            return record if needs is None or record.get("facts", {}).get(needs) else None

        return until(told, within_s=WITHIN_S, what=f"its record has {needs}")

    def models_of(self, node: NodeId) -> list[str]:
        """Fingerprints of the models that `node` tells of, once it tells of any."""
        return [
            str(model["fingerprint"]) for model in self.record_of(node, needs="models")["facts"]["models"]
        ]

    def version_of(self, node: NodeId) -> tuple[int, int]:
        """Incarnation and sequence of the last record of `node`."""
        record = self.record_of(node)
        return int(record["i"]), int(record["s"])

    def settings_of(self, node: NodeId) -> dict[str, Any]:
        settings = self.record_of(node, needs="settings")["facts"]["settings"]
        assert isinstance(settings, dict)
        return settings

    def invites_of(self, node: NodeId) -> list[str]:
        """By which a connected member got in: its credential shows them."""
        return [grant.invite for grant in self.peer(node).credential]

    def offer(self, fingerprint: Fingerprint, path: Path, cache: Path) -> None:
        """Sends this model's file to whoever asks for it, as an honest node would."""
        offers = Offers(
            models=lambda: {fingerprint: (path,)},
            digests=Digests(cache),
            throttle=Throttle(busy=lambda: False),
        )

        async def serve(_: NodeId, header: dict[str, Any], stream: Stream) -> None:
            await offers.answer(stream, header)

        self.handler.services["file"] = serve


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that an adversary opened."""

    loop: Background
    stream: Stream

    def write(self, data: bytes) -> None:
        self.loop.run(self.stream.write(data))

    def document(self, *, within_s: float = WITHIN_S) -> dict[str, Any] | None:
        """What it is answered; None where the stream is refused, or ends without a word."""
        try:
            return self.loop.run(self.stream.read_document(1 << 20), within_s=within_s)
        except PeerLost:
            return None

    def all(self, *, within_s: float = WITHIN_S) -> bytes | None:
        """All bytes that come back; None where the stream is refused."""

        async def read() -> bytes:
            parts = []
            while part := await self.stream.read(READ_BYTES):
                parts.append(part)
            return b"".join(parts)

        try:
            return self.loop.run(read(), within_s=within_s)
        except PeerLost:
            return None

    def reset(self) -> None:
        self.loop.call(self.stream.reset)


class _Handler:
    """Writes down what it is told, and answers pings: who is silent is no member for long."""

    def __init__(self, adversary: Adversary) -> None:
        self._adversary = adversary
        self.messages: list[tuple[NodeId, dict[str, Any]]] = []
        self.records: dict[NodeId, dict[str, Any]] = {}
        self.acks: set[int] = set()
        self.streams: list[tuple[NodeId, str, dict[str, Any]]] = []
        self.services: dict[str, Serve] = {}
        self.silent = threading.Event()
        """Set: pings are not answered."""

    def on_peer(self, peer: Peer) -> None:
        pass

    def on_lost(self, peer: Peer, reason: str) -> None:
        pass

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None:
        self.messages.append((peer.id, body))
        match body.get("kind"):
            case "ping" if not self.silent.is_set():
                peer.send(self._adversary.ack(body))
            case "ack":
                self.acks.add(body["n"])
            case "update":
                self.records |= {record["id"]: record for record in body["records"]}

    def on_duplicate(self) -> None:
        pass

    def on_refused(self, node: NodeId, reason: str) -> None:
        pass

    def on_address(self) -> None:
        pass

    def kinds_for(self, role: Role) -> list[str]:
        return list(self.services)

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        return {}

    async def on_stream(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        self.streams.append((peer.id, kind, header))
        with suppress(MeshError):
            await self.services[kind](peer.id, header, stream)


class _Door:
    """An endpoint that takes every connection and closes it with one code, before a word is said."""

    def __init__(self, config: NetworkConfig, code: Code) -> None:
        self._config = config
        self._code = code
        self._endpoint: Any = None
        self._task: asyncio.Task[None] | None = None
        self.address = Address()
        self.dialled = 0

    async def open(self) -> None:
        self._endpoint = await bind(self._config)
        self.address = address_of(self._endpoint, self._config)
        self._task = asyncio.create_task(self._refuse(), name="refuse all")

    async def _refuse(self) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            with suppress(iroh().IrohError):
                connection = await (await incoming.accept()).connect()
                # The one that dials is in its handshake when it has opened the first stream.
                await connection.accept_bi()
                close(connection, self._code)
                self.dialled += 1

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        with suppress(TimeoutError, iroh().IrohError):
            async with asyncio.timeout(2.0):
                await self._endpoint.close()
