"""A member that sends thousands of documents that are almost right: nobody else notices."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import pytest

from mesh_llm.errors import MeshError
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    id_of,
    is_expelled,
    mistakes,
    remembered,
    serves,
    settings_kept,
)
from tests.hostile.mutation import Mutations
from tests.support.joining import TEXT, JoiningNode, Lab, lab

MESSAGES = ("ping", "ack", "hears", "update", "compare", "summary", "want", "leave", "revocations")
STREAMS = ("http", "serving", "forward", "forwarded", "introduce", "lease", "link", "file")
QUICK, FULL = 200, 10_000
SEED = 1
MESSAGES_AT_ONCE = 50
"""Then it waits until they are read: a sender's queue has a bound."""
STREAMS_AT_ONCE = 25
REQUEST_S = 1.0
"""Between two requests of the honest client."""
ANSWER_S = 20.0
"""For each, on a machine that is busy with something else: a tenth of a second otherwise."""
JUNK = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"x": \xff\x00'


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
    before = settings_kept(one), remembered(one.home)["membership"]["mesh"]
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
    assert (settings_kept(one), remembered(one.home)["membership"]["mesh"]) == before
    assert not is_expelled(one.home)
    assert serves(mesh.one) == serves(mesh.client, within_s=QUICK_S)


def seed_of(kind: str) -> int:
    return SEED + zlib.crc32(kind.encode())


def texts_of(bad: Adversary, mesh: Mesh, kind: str, seed: int, count: int) -> list[bytes]:
    """Of what is right at this moment: a number that is out of date is no attack."""
    status = mesh.one.status()
    one, client = id_of(mesh.one), id_of(mesh.client)
    documents = bad.messages(one) | bad.streams(
        client, epoch=status["plan"]["epoch"], fingerprint=status["model"]["fingerprint"]
    )
    ids = (one, client, bad.id, "0" * 64, "ab" * 32)
    return list(Mutations(documents[kind], seed=seed, ids=ids).texts(count))


def is_back(bad: Adversary, one: JoiningNode) -> bool:
    """Connected, again where it was sent away; not where nobody is left to be connected to."""
    if bad.inviter not in bad.network.peers and one.running:
        with suppress(MeshError, TimeoutError):
            bad.connect(bad.inviter, address_of(one))
    return bad.inviter in bad.network.peers


def fuzz_messages(mesh: Mesh, bad: Adversary, kind: str, count: int) -> None:
    for start in range(0, count, MESSAGES_AT_ONCE):
        if not is_back(bad, mesh.one):
            return
        # It may be sent away meanwhile, and rightly so.
        with suppress(KeyError, AssertionError):
            for text in texts_of(bad, mesh, kind, seed_of(kind) + start, MESSAGES_AT_ONCE):
                bad.send_text(text)
            bad.settle(within_s=QUICK_S)


def fuzz_streams(mesh: Mesh, bad: Adversary, kind: str, count: int) -> None:
    for start in range(0, count, STREAMS_AT_ONCE):
        if not is_back(bad, mesh.one):
            return
        with suppress(KeyError, AssertionError):
            bad.open_text(texts_of(bad, mesh, kind, seed_of(kind) + start, STREAMS_AT_ONCE), data=JUNK)


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("count", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_messages(mesh: Mesh, villain: Villain, kind: str, count: int) -> None:
    bad = villain(mesh.one.token())
    bad.introduce()
    with attack(mesh):
        fuzz_messages(mesh, bad, kind, count)
        bad.end()


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("count", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def test_streams(mesh: Mesh, villain: Villain, kind: str, count: int) -> None:
    bad = villain(mesh.one.token())
    bad.introduce()
    with attack(mesh):
        fuzz_streams(mesh, bad, kind, count)
        bad.end()
