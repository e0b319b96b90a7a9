"""A member that keeps to no rules, on the project's own transport.

All that these tests know of the wire is in this file: the documents of messages, the headers of streams,
what is signed; `templates` puts them together. Where one of them changes, this is the place.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.errors import MeshError
from mesh_llm.membership.messages import signed_to_document
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.serve import FileServer
from mesh_llm.peer_fetch.throttle import Throttle
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.claims import Claim, sign
from mesh_llm.transport.close_codes import Code
from mesh_llm.transport.credential import Credential, extend
from mesh_llm.transport.framing import FRAME_VERSION, HEAD, LENGTH, FrameType
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import decode
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.network import Membership, Network, NetworkConfig, Peer, Stream
from mesh_llm.types import Address, Fingerprint, MeshId, NodeId, Role
from tests.hostile.ends import READ_BYTES, Door, Ear, Opened
from tests.support.background import WITHIN_S, Background
from tests.support.members import new_identity
from tests.support.waiting import until

LARGEST = (1 << 53) - 1
"""The largest number that a message may carry."""

FORGERIES = ("their signature", "their credential", "its own name")
"""Of what another one has signed: its text changed, signed by the adversary under the other one's
credential, and signed by the adversary as itself."""

Data = bytes | Callable[[dict[str, Any]], bytes]
"""What follows on a stream; where it is a function, once the other side has sent a challenge."""


class Adversary:
    """Joins with a token, and says what it likes. Methods block; its answers to pings do not wait for them.

    `to` is a node's id; where it is left out, the one that let it in.
    """

    def __init__(self, loop: Background, *, name: str = "mallory", identity: Identity | None = None) -> None:
        self._loop = loop
        self.name = name
        self.identity = identity or new_identity()
        self.id = self.identity.id
        self.handler = Ear(self.ack)
        self.incarnation = int(time.time() * 1000) * 1000
        self.sequence = 0
        self.role = Role.NODE
        self.inviter = NodeId("")
        self.membership = Membership()
        self.network = Network(self._config(), self.membership, self.handler)
        self._door: Door | None = None
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

    def open_door(self, code: Code, show: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A place, as a record names it, where everybody who dials it is told `code` in the handshake.

        And before, that it was expelled, where there is something to `show` for it.
        """
        self._door = Door(self._config(), code, show)
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

    def open_text(self, streams: Sequence[tuple[bytes, Data]], *, within_s: float = 0.3) -> int:
        """Streams that begin with these, all at once; their answers are read for so long, then they break.

        How many of them did begin.
        """
        return self._loop.run(self._open_text(streams, within_s))

    async def _open_text(self, streams: Sequence[tuple[bytes, Data]], within_s: float) -> int:
        peer = self.peer()
        begun = 0

        async def one(text: bytes, data: Data) -> None:
            nonlocal begun
            with suppress(iroh().IrohError, MeshError, TimeoutError):
                # A node serves so many streams at once: the next one waits until one of them has ended.
                async with asyncio.timeout(WITHIN_S / 2):
                    stream = Stream(await peer._connection.open_bi(), peer._spawn)
                try:
                    async with asyncio.timeout(within_s):
                        await stream.write(LENGTH.pack(len(text)) + text)
                        begun += 1
                        if not isinstance(data, bytes):
                            answer = data(await stream.read_document())
                            data = LENGTH.pack(len(answer)) + answer
                        await stream.write(data)
                        while await stream.read(READ_BYTES):
                            pass
                finally:
                    stream.reset()

        await asyncio.gather(*(one(text, data) for text, data in streams))
        return begun

    def settle(self, to: NodeId | None = None, *, within_s: float = WITHIN_S) -> bool:
        """Until all that it sent before has been read over there: a ping goes the same way.

        False where the other side has closed the connection instead of an answer.
        """
        return self.said(to=to, within_s=within_s)

    def said(self, *bodies: dict[str, Any], to: NodeId | None = None, within_s: float = WITHIN_S) -> bool:
        """Send these, and settle."""
        peer, number = self.peer(to), secrets.randbelow(LARGEST)
        # At once: the first may be the last that is listened to.
        self.send(*bodies, self.ping(number), to=to)
        answered = self.handler.acks
        until(
            lambda: number in answered or peer.closing is not None,
            within_s=within_s,
            what="its ping is answered",
        )
        return number in answered

    def tell(self, *records: dict[str, Any], to: NodeId | None = None) -> bool:
        """As a member that passes on what it heard, and wait until it was read; see `settle`."""
        return self.said(self.update(*records), to=to)

    def introduce(self, *, to: NodeId | None = None, settle: bool = True, **facts: Any) -> None:
        """Its own record, as every member has one."""
        self.sequence += 1
        self.send(self.update(self.record(facts=self.facts(**facts))), to=to)
        if settle:
            assert self.settle(to), self.refusal(to)

    # -- what it signs ---------------------------------------------------------------------------

    @property
    def mesh(self) -> MeshId:
        assert self.membership.mesh is not None
        return self.membership.mesh

    @property
    def credential(self) -> str:
        return credentials.to_text(self.membership.credential)

    def seal(self, claim: Claim, text: str) -> dict[str, Any]:
        """By its own key and credential, whatever the text says."""
        return self._sealed(self.identity, self.membership.credential, claim, text)

    def _sealed(self, who: Identity, credential: Credential, claim: Claim, text: str) -> dict[str, Any]:
        return signed_to_document(sign(who, self.mesh, credential, claim, text))

    def forge(self, theirs: dict[str, Any], claim: Claim, text: str, way: str) -> dict[str, Any]:
        """As if the one who has signed `theirs` had signed `text`; or, `its own name`, as itself."""
        signed = self.seal(claim, text)
        match way:
            case "their signature":
                return signed | {"signature": theirs["signature"], "credential": theirs["credential"]}
            case "their credential":
                return signed | {"credential": theirs["credential"]}
        return signed

    def below(self, count: int) -> list[tuple[Identity, Credential]]:
        """Nodes that it has let in, as many as it likes."""
        found = []
        for _ in range(count):
            identity = new_identity()
            own = self.membership.credential
            invite = secrets.token_hex(8)
            found.append((identity, extend(own, self.mesh, self.identity, identity.id, Role.NODE, invite)))
        return found

    def sealed(self, document: Any) -> Any:
        """The document with everything in it signed that has a `claim` and a `text`."""
        if isinstance(document, list):
            return [self.sealed(each) for each in document]
        if not isinstance(document, dict):
            return document
        claim, text = document.get("claim"), document.get("text")
        rest = {key: self.sealed(value) for key, value in document.items() if key not in ("claim", "text")}
        if isinstance(claim, str) and claim in list(Claim):
            words = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            return rest | self.seal(Claim(claim), words)
        return rest | {key: document[key] for key in ("claim", "text") if key in document}

    # -- documents -------------------------------------------------------------------------------

    def ping(self, number: int) -> dict[str, Any]:
        return {"kind": "ping", "n": number, "i": self.incarnation, "d": 0, "h": 0, "k": True}

    def ack(self, ping: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "ack", "n": ping.get("n"), "i": self.incarnation, "d": ping.get("d")}

    @staticmethod
    def update(*records: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "update", "records": list(records)}

    def record(
        self, *, facts: dict[str, Any], incarnation: int | None = None, sequence: int | None = None
    ) -> dict[str, Any]:
        """What it says about itself, signed."""
        numbers = self.numbers(self.id, incarnation, sequence)
        return numbers | self.seal(Claim.RECORD, json.dumps(numbers | {"facts": facts}))

    def numbers(
        self, node: NodeId, incarnation: int | None = None, sequence: int | None = None
    ) -> dict[str, Any]:
        return {
            "id": node,
            "i": self.incarnation if incarnation is None else incarnation,
            "s": self.sequence if sequence is None else sequence,
        }

    def hint(self, node: NodeId, standing: str, *, incarnation: int, sequence: int) -> dict[str, Any]:
        """What it takes a node for; that needs no signature."""
        return self.numbers(node, incarnation, sequence) | {"is": standing}

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

    def altered(
        self,
        node: NodeId,
        way: str,
        *,
        incarnation: int | None = None,
        ahead: int = 1000,
        left: bool = False,
        **facts: Any,
    ) -> dict[str, Any]:
        """Another one's last record, with other facts, as if that one had said so later."""
        theirs = self.record_of(node)
        numbers = self.numbers(
            node, theirs["i"] if incarnation is None else incarnation, int(theirs["s"]) + ahead
        )
        document = numbers | {"facts": {**facts_in(theirs), **facts}} | ({"left": True} if left else {})
        signed = self.forge(theirs, Claim.RECORD, json.dumps(document), way)
        return numbers | signed | ({"is": "left"} if left else {})

    @staticmethod
    def place(address: str) -> dict[str, Any]:
        """`IP:PORT`, as the address in a record."""
        return {"direct": [address]}

    @staticmethod
    def held(fingerprint: str, name: str, size_bytes: int) -> dict[str, Any]:
        """A model, as a record lists it."""
        return {"fingerprint": fingerprint, "name": name, "size_bytes": size_bytes}

    def serving(
        self, *, epoch: int, layers: int, settings_version: int = 1, host: NodeId | None = None
    ) -> dict[str, Any]:
        """A plan, as one that hosts all of it publishes it."""
        stage = {
            "node": host or self.id,
            "first": 0,
            "last": layers,
            "weight_bytes": 1,
            "need_bytes": 1,
            "share": 1.0,
        }
        plan = {
            "mode": "solo",
            "host": host or self.id,
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
    def claims(
        *, settings: Sequence[dict[str, Any]] = (), revocations: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        return {"kind": "claims", "settings": list(settings), "revocations": list(revocations)}

    def settings_claim(self, settings: dict[str, Any], way: str = "its own name") -> dict[str, Any]:
        """Settings for the mesh, as if its creator had set them; or in its own name."""
        text = json.dumps({"settings": settings})
        return self.claims(settings=[self.forge(self.creators, Claim.SETTINGS, text, way)])

    def revoked(self, invite: str, way: str = "its own name") -> dict[str, Any]:
        """A revocation, as if the mesh's creator had signed it; or in its own name."""
        text = json.dumps({"revoke": invite})
        if way == "its own name":
            return self.seal(Claim.REVOCATION, text)
        return self.forge(self.creators, Claim.REVOCATION, text, way)

    def revoked_by(self, who: tuple[Identity, Credential], invite: str) -> dict[str, Any]:
        """The word of one of those `below`."""
        return self._sealed(*who, Claim.REVOCATION, json.dumps({"revoke": invite}))

    @property
    def creators(self) -> dict[str, Any]:
        """What the creator has signed for all to see: its settings. Its credential is empty."""
        signed = self.handler.settings
        until(lambda: "" in signed, within_s=WITHIN_S, what="the creator's settings come")
        return signed[""]

    @staticmethod
    def promotion(credential: str) -> dict[str, Any]:
        return {"kind": "promotion", "credential": credential}

    def guest(self) -> dict[str, Any]:
        """What a client says of itself."""
        return {"kind": "guest", "name": self.name, "version": __version__, "state": "serving", "reason": ""}

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

    def proof(
        self, challenge: dict[str, Any], to: NodeId, kind: str, header: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer to a `forwarded` stream's challenge, to be `sealed`."""
        text = {"to": to, "nonce": challenge.get("nonce"), "kind": kind, "header": header}
        return {"claim": "stream", "text": text}

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
            return record if needs is None or facts_in(record).get(needs) else None

        return until(told, within_s=WITHIN_S, what=f"its record has {needs}")

    def models_of(self, node: NodeId) -> list[str]:
        """Fingerprints of the models that `node` tells of, once it tells of any."""
        return [
            str(model["fingerprint"]) for model in facts_in(self.record_of(node, needs="models"))["models"]
        ]

    def version_of(self, node: NodeId) -> tuple[int, int]:
        """Incarnation and sequence of the last record of `node`."""
        record = self.record_of(node)
        return int(record["i"]), int(record["s"])

    def settings_of_creator(self) -> dict[str, Any]:
        settings = json.loads(self.creators["text"])["settings"]
        assert isinstance(settings, dict)
        return settings

    def refusal(self, by: NodeId | None = None) -> str:
        """Why `by` has closed the connection the last time."""
        return next((why for node, why in reversed(self.handler.lost) if node == (by or self.inviter)), "")

    def invites_of(self, node: NodeId) -> list[str]:
        """By which a connected member got in: its credential shows them."""
        return [grant.invite for grant in self.peer(node).credential]

    def offer(self, fingerprint: Fingerprint, path: Path, cache: Path) -> None:
        """Sends this model's file to whoever asks for it, as an honest node would."""
        offers = FileServer(
            models=lambda: {fingerprint: (path,)},
            digests=PieceHashes(cache),
            throttle=Throttle(busy=lambda: False),
        )

        async def serve(origin: NodeId, header: dict[str, Any], stream: Stream) -> None:
            await offers.answer(stream, header, origin=origin)

        self.handler.services["file"] = serve


def facts_in(record: dict[str, Any]) -> dict[str, Any]:
    """What a node has signed about itself."""
    facts = json.loads(record["text"])["facts"]
    assert isinstance(facts, dict)
    return facts
