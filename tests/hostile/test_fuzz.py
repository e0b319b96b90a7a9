"""A member that sends thousands of documents that are almost right: nobody else notices."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest

from mesh_llm.errors import Forged, MeshError
from mesh_llm.membership.messages import _SHAPES as SHAPES
from mesh_llm.membership.settings_documents import settings_to_document
from mesh_llm.mesh_settings import Draft, MeshSettings
from mesh_llm.node.incoming_streams import IncomingStreams
from mesh_llm.peers import claims_exchange
from mesh_llm.peers.mesh import Mesh as NodeMesh
from mesh_llm.transport.claims import Claim, sign
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.revocations import Revocations
from mesh_llm.types import Fingerprint, MeshId, NodeFacts, Role
from tests.hostile import templates
from tests.hostile.adversary import Adversary, Data
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    id_of,
    is_expelled,
    membership,
    mistakes,
    serves,
    settings_kept,
)
from tests.hostile.mutation import Mutations
from tests.support.joining import TEXT, JoiningNode, Lab, lab
from tests.support.members import new_identity

SIGNED = ("update", "leave", "claims")
"""Who sends a wrong one is disconnected."""
MESSAGES = ("ping", "ack", "hears", "compare", "summary", "want", "promotion", "guest", *SIGNED)
STREAMS = ("http", "serving", "forward", "forwarded", "introduce", "lease", "link", "file")
QUICK, FULL = 100, 10_000
SEED = 1
MESSAGES_AT_ONCE = 50
"""Then it waits until they are read: a sender's queue has a bound."""
STREAMS_AT_ONCE = 25
RETURNS = 20
REQUEST_S = 1.0
"""Between two requests of the honest client."""
ANSWER_S = 20.0
"""For each, on a machine that is busy with something else: a tenth of a second otherwise."""
JUNK = (
    b"",
    b"\0" * 200,
    b"\xff\xfe\r\n\r\n",
    b"GET",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost:22\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"x": \xff\x00',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
)
"""What follows on a stream; most of it is no HTTP."""


class Mesh:
    """A creator, and an honest client of its; made anew where an attack has left nothing of them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._open: Lab | None = None
        self._context = lab(model)
        self.one: JoiningNode
        self.client: JoiningNode

    def whole(self) -> Mesh:
        if self._open is None or not (self.one.running and self.client.running):
            self.end()
            self._context = lab(self._model)
            self._open = self._context.__enter__()
            self.one = self._open.create("one")
            token = self.one.token(role="client")
            self.client = self._open.start("client", "--client", "--join", token).until_ready()
        serves(self.client)
        return self

    def restart(self) -> None:
        assert self._open is not None
        self.one.stop()
        self.one = self._open.create("one")

    def end(self) -> None:
        if self._open is not None:
            self._open = None
            self._context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def kept(model: Path) -> Iterator[Mesh]:
    mesh = Mesh(model)
    try:
        yield mesh
    finally:
        mesh.end()


@pytest.fixture
def mesh(kept: Mesh, request: pytest.FixtureRequest) -> Iterator[Mesh]:
    failed = request.session.testsfailed
    yield kept.whole()
    if request.session.testsfailed > failed:
        # What an attack has spoilt is not the next one's to bear.
        kept.end()


class Asking:
    """A person who asks for text, time and again, and wants an answer each time."""

    def __init__(self, node: JoiningNode) -> None:
        self._place = urlsplit(node.url).netloc
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest client", daemon=True)
        self.answers = 0
        self.failures: list[str] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        while not self._over.is_set():
            self._ask()
            self._over.wait(REQUEST_S)

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            with closing(HTTPConnection(self._place, timeout=ANSWER_S)) as connection:
                body = json.dumps(TEXT)
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
            if response.status == 200:
                self.answers += 1
            else:
                self.failures.append(f"{response.status} {text[:300]!r}")
        except (OSError, HTTPException) as error:
            self.failures.append(f"{error!r} after {time.monotonic() - began:.1f} s")


@contextmanager
def attack(mesh: Mesh) -> Iterator[None]:
    """Around all that is sent; the oracle of every test here."""
    one = mesh.one
    before = settings_kept(one), membership(one.home).mesh
    known = Counter(mistakes(one))
    with Asking(mesh.client) as asking:
        yield
        asked = asking.answers
        one.until(lambda: asking.answers > asked or asking.failures, what="a last request is answered")
    assert one.running, f"it ended: {one.stderr}"
    assert mesh.client.running, f"the client ended: {mesh.client.stderr}"
    assert asking.failures == [], f"of {asking.answers + len(asking.failures)} requests"
    made = Counter(mistakes(one)) - known
    assert not made, f"in its log: {made.most_common(8)}"
    mesh.restart()
    assert (settings_kept(one), membership(one.home).mesh) == before
    assert not is_expelled(one.home)
    assert serves(mesh.one) == serves(mesh.client, within_s=QUICK_S)


class Fuzz:
    """An adversary that sends mutations of one kind, and comes back whenever it is sent away."""

    def __init__(self, mesh: Mesh, bad: Adversary, kind: str) -> None:
        self._mesh = mesh
        self._bad = bad
        self._kind = kind
        self._one, self._client = id_of(mesh.one), id_of(mesh.client)
        ids = (self._one, self._client, bad.id, "0" * 64, "ab" * 32)
        self._mutations = Mutations(seed=SEED + zlib.crc32(kind.encode()), ids=ids, seal=bad.sealed)
        self._address = address_of(mesh.one)
        self.arrived = 0
        """Messages that were read over there, or for which it was sent away."""

    def messages(self, count: int) -> None:
        """In batches; where one of them may close the connection, each for itself."""
        at_once = 1 if self._kind in SIGNED else MESSAGES_AT_ONCE
        theirs: dict[str, Any] = {}
        outdated = 0
        while self.arrived < count and self._is_back():
            if self.arrived >= outdated:
                # What is right at this moment: a number that is out of date is no attack.
                with suppress(KeyError, AssertionError):
                    theirs = self._bad.record_of(self._one)
                    self._bad.handler.messages.clear()
                    outdated = self.arrived + MESSAGES_AT_ONCE
                continue
            documents = [templates.messages(self._bad, theirs)[self._kind] for _ in range(at_once)]
            # It may be sent away meanwhile, and rightly so.
            with suppress(KeyError):
                for document in documents:
                    self._bad.send_text(self._mutations.text(document))
                    self.arrived += 1
                self._bad.settle(within_s=QUICK_S)

    def streams(self, count: int) -> None:
        status = self._mesh.one.status()
        epoch, fingerprint = status["plan"]["epoch"], status["model"]["fingerprint"]
        begin = templates.streams(self._bad, self._client, epoch=epoch, fingerprint=fingerprint)[self._kind]
        while self.arrived < count and self._is_back():
            with suppress(KeyError):
                self.arrived += self._bad.open_text([self._stream(begin) for _ in range(STREAMS_AT_ONCE)])

    def _stream(self, begin: dict[str, Any]) -> tuple[bytes, Data]:
        """A wrong beginning, or a right one with something wrong behind."""
        dice = self._mutations.dice
        behind = self._kind in ("http", "forwarded") and dice.random() < 0.7
        text = json.dumps(begin).encode() if behind else self._mutations.text(begin)
        if self._kind == "forwarded":
            return text, self._answer
        return text, dice.choice(JUNK)

    def _answer(self, challenge: dict[str, Any]) -> bytes:
        kind = self._mutations.dice.choice(STREAMS)
        return self._mutations.text(self._bad.proof(challenge, self._one, kind, {"epoch": 1}))

    def _is_back(self) -> bool:
        """Connected, again where it was sent away; not where nobody is left to be connected to."""
        bad = self._bad
        for _ in range(RETURNS):
            if bad.inviter in bad.network.peers:
                return True
            if not self._mesh.one.running:
                return False
            with suppress(MeshError, TimeoutError):
                bad.connect(bad.inviter, self._address)
        raise AssertionError(f"it is not let in again: {bad.refusal()}")


def run(mesh: Mesh, bad: Adversary, kind: str, count: int) -> None:
    """All of it arrived, as far as a node was there to receive it."""
    fuzz = Fuzz(mesh, bad, kind)
    (fuzz.messages if kind in MESSAGES else fuzz.streams)(count)
    assert fuzz.arrived >= count or not mesh.one.running


def test_every_kind_is_tried() -> None:
    """What a node learns to understand has to be added to the lists above."""
    facts = NodeFacts(name="n", role=Role.NODE, version="1")
    node = NodeMesh(
        new_identity().id, facts, incarnation=1, on_change=lambda: None, on_refused=lambda node, why: None
    )
    nothing: Any = SimpleNamespace(lending=None)
    node.attach(nothing, IncomingStreams(nothing, nothing, nothing, nothing, nothing).services)
    assert sorted(STREAMS) == sorted(node.kinds_for(Role.NODE))
    assert sorted(MESSAGES) == sorted([*SHAPES, claims_exchange.KIND, claims_exchange.PROMOTION])


@pytest.mark.parametrize("role", ["node", pytest.param("client", marks=pytest.mark.full)])
def test_messages(mesh: Mesh, villain: Villain, role: str) -> None:
    bad = villain(mesh.one.token(role=role))
    bad.introduce()
    with attack(mesh):
        for kind in MESSAGES:
            run(mesh, bad, kind, QUICK)
        bad.end()


@pytest.mark.long
@pytest.mark.parametrize("role", ["node", "client"])
def test_streams(mesh: Mesh, villain: Villain, role: str) -> None:
    bad = villain(mesh.one.token(role=role))
    bad.introduce()
    with attack(mesh):
        for kind in STREAMS:
            run(mesh, bad, kind, QUICK)
        bad.end()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*MESSAGES, *STREAMS])
def test_one_kind_for_long(mesh: Mesh, villain: Villain, kind: str) -> None:
    bad = villain(mesh.one.token(role="client" if kind == "guest" else "node"))
    bad.introduce()
    with attack(mesh):
        run(mesh, bad, kind, FULL)
        bad.end()


@pytest.mark.parametrize("count", [QUICK, pytest.param(FULL, marks=pytest.mark.long)])
def test_an_owners_settings(count: int) -> None:
    """They are read from an owner alone, which may set what it likes: only that they are read is tried."""
    owner = new_identity()
    mesh = MeshId(owner.id)
    kept = Membership(mesh=mesh, revocations=Revocations(mesh))
    settings = MeshSettings(
        version=1,
        model="m",
        fingerprint=Fingerprint("ab"),
        alias="m",
        digest="ab" * 32,
        context=512,
        slots=1,
        tensor_split=(1.0, 2.0),
        layers=(("one", 0, 1),),
        draft=Draft(name="d", fingerprint=Fingerprint("cd"), weight_bytes=1, cache_bytes=1, compute_bytes=1),
    )
    mutations = Mutations(seed=SEED, ids=(owner.id, "0" * 64))
    taken = 0
    for number in range(count):
        document = settings_to_document(replace(settings, version=number + 1))
        text = mutations.text({"settings": document}).decode()
        try:
            taken += kept.take_settings(sign(owner, mesh, (), Claim.SETTINGS, text), now=time.time())
        except Forged:
            continue
        assert Membership.from_document(kept.to_document(), now=time.time()).settings == kept.settings
    assert taken > 0
