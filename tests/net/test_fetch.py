"""Model files from peers: one source and several, cut connections, killed receivers, hostile sources."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models import digests as digests_module
from mesh_llm.models import incoming
from mesh_llm.models.digests import Digests
from mesh_llm.models.fetch import FetchTimes, Source, Verify, Wanted, fetch
from mesh_llm.models.stream import ByteStream
from mesh_llm.models.throttle import Throttle
from mesh_llm.types import Event, Fingerprint, Progress
from tests.support import tiny_gguf
from tests.support.file_peer import PIECE_BYTES, Answer, Peer, connect, honest, meddling, peer

QUICK = FetchTimes(stall_s=10.0, pause_s=0.0)
HASTY = FetchTimes(stall_s=0.3, pause_s=0.0)
"""For peers that never send what they should: how long that takes is not what is tested."""


async def digest_of(paths: tuple[Path, ...]) -> Fingerprint:
    """Stands in for the fingerprint, and stricter: every byte counts."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return Fingerprint(whole.hexdigest())


class Model:
    """A model at some peer's, and what a receiver needs to fetch it."""

    def __init__(self, files: Sequence[Path], tmp_path: Path) -> None:
        self.files = tuple(files)
        self.content = [file.read_bytes() for file in files]
        self.fingerprint = Fingerprint(hashlib.sha256(b"".join(self.content)).hexdigest())
        self.cache = tmp_path / "cache"
        self.folder = tmp_path / "models"
        self.events: list[Event] = []
        self.steps: list[Progress] = []

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.content))

    def honest(self, **options: Any) -> Answer:
        return honest(self.cache, self.fingerprint, self.files, **options)

    async def fetch(
        self,
        *peers: Peer,
        times: FetchTimes = QUICK,
        verify: Verify = digest_of,
        size_bytes: int | None = None,
        shards: frozenset[int] | None = None,
        digests: Digests | None = None,
    ) -> tuple[Path, ...]:
        return await fetch(
            Wanted(fingerprint=self.fingerprint, name="tiny", size_bytes=size_bytes, shards=shards),
            self.folder,
            sources=lambda: [each.source for each in peers],
            verify=verify,
            progress=self.steps.append,
            events=self.events.append,
            digests=digests,
            times=times,
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def parts(self) -> list[Path]:
        return sorted(self.folder.glob(".incoming-fetch-*/*/*.gguf"))

    def said(self) -> list[str]:
        return [event.text for event in self.events]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "source").mkdir()
    path = tiny_gguf.write(tmp_path / "source" / "tiny.gguf", "llama", hidden=128)
    assert path.stat().st_size > 20 * PIECE_BYTES
    return Model([path], tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Model:
    (tmp_path / "source").mkdir()
    return Model(tiny_gguf.write_shards(tmp_path / "source" / "tiny.gguf", 3, "llama"), tmp_path)


# -- one source -----------------------------------------------------------------------------------


async def test_a_file_arrives_whole(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        paths = await model.fetch(anna, size_bytes=model.size_bytes)
    assert paths == (model.folder / "tiny.gguf",)
    assert paths[0].read_bytes() == model.content[0]
    assert model.names() == ["tiny.gguf"]
    assert model.events == []
    assert model.steps[-1] == Progress(
        what="Fetching tiny", done=model.size_bytes, total=model.size_bytes, unit="bytes"
    )
    done = [step.done for step in model.steps]
    assert done == sorted(done)


async def test_the_fingerprint_of_the_engine_is_the_proof(model: Model) -> None:
    async def verify(paths: tuple[Path, ...]) -> Fingerprint:
        return Fingerprint((await read_gguf(paths[0]))["fingerprint"])

    model.fingerprint = await verify(model.files)
    async with peer("anna", model.honest()) as anna:
        paths = await model.fetch(anna, verify=verify)
    assert paths[0].read_bytes() == model.content[0]


async def test_a_model_in_several_files_keeps_their_numbers(sharded: Model) -> None:
    async def verify(paths: tuple[Path, ...]) -> Fingerprint:
        return Fingerprint((await read_gguf(paths[0]))["fingerprint"])

    sharded.fingerprint = await verify(sharded.files)
    async with peer("anna", sharded.honest()) as anna:
        paths = await sharded.fetch(anna, verify=verify)
    assert [path.name for path in paths] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert [path.read_bytes() for path in paths] == sharded.content
    assert sharded.names() == [path.name for path in paths]


async def test_one_shard_alone_then_the_rest(sharded: Model) -> None:
    one = Fingerprint(hashlib.sha256(sharded.content[1]).hexdigest())
    all_of_it = sharded.fingerprint

    async def verify_one(paths: tuple[Path, ...]) -> Fingerprint:
        assert await digest_of(paths) == one
        return all_of_it

    async with peer("anna", sharded.honest()) as anna:
        paths = await sharded.fetch(anna, shards=frozenset({1}), verify=verify_one)
        assert paths == (sharded.folder / "tiny-00002-of-00003.gguf",)
        assert paths[0].read_bytes() == sharded.content[1]
        assert sharded.names() == ["tiny-00002-of-00003.gguf"]
        assert anna.offsets == [(1, 0)]

        paths = await sharded.fetch(anna)
        assert [path.read_bytes() for path in paths] == sharded.content
        assert anna.offsets == [(1, 0), (0, 0), (2, 0)]
    assert len(sharded.names()) == 3


async def test_a_receiver_can_offer_without_hashing_again(model: Model, tmp_path: Path) -> None:
    digests = Digests(tmp_path / "own cache", piece_bytes=PIECE_BYTES)
    async with peer("anna", model.honest()) as anna:
        (path,) = await model.fetch(anna, digests=digests)
    known = digests.known(path)
    assert known is not None
    assert known == Digests(model.cache, piece_bytes=PIECE_BYTES).known(model.files[0])


async def test_an_existing_file_of_that_name_stays(model: Model) -> None:
    model.folder.mkdir()
    (model.folder / "tiny.gguf").write_bytes(b"mine")
    (model.folder / "tiny-2.gguf").write_bytes(bytes(model.size_bytes))
    async with peer("anna", model.honest()) as anna:
        paths = await model.fetch(anna)
    assert paths == (model.folder / "tiny-3.gguf",)
    assert (model.folder / "tiny.gguf").read_bytes() == b"mine"
    assert (model.folder / "tiny-2.gguf").read_bytes() == bytes(model.size_bytes)


async def test_a_damaged_file_of_that_name_and_size_stays_too(model: Model) -> None:
    model.folder.mkdir()
    damaged = b"X" + model.content[0][1:]
    (model.folder / "tiny.gguf").write_bytes(damaged)
    async with peer("anna", model.honest()) as anna:
        paths = await model.fetch(anna)
    assert paths == (model.folder / "tiny-2.gguf",)
    assert paths[0].read_bytes() == model.content[0]
    assert (model.folder / "tiny.gguf").read_bytes() == damaged


async def test_a_file_that_is_there_is_not_fetched(model: Model) -> None:
    model.folder.mkdir()
    (model.folder / "tiny.gguf").write_bytes(model.content[0])
    async with peer("anna", model.honest()) as anna:
        assert await model.fetch(anna) == (model.folder / "tiny.gguf",)
        assert anna.bytes_asked == 0
    assert model.names() == ["tiny.gguf"]


async def test_two_fetches_at_once_share_one(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        first, second = await asyncio.gather(model.fetch(anna), model.fetch(anna))
        assert first == second == (model.folder / "tiny.gguf",)
        assert anna.bytes_asked == model.size_bytes
    assert model.names() == ["tiny.gguf"]


# -- cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 300_000, -1])
async def test_the_next_peer_goes_on_where_one_was_cut(model: Model, cut: int) -> None:
    cut %= model.size_bytes
    async with (
        peer("anna", meddling(model.honest(), limit=cut)) as anna,
        peer("bert", model.honest()) as bert,
    ):
        paths = await model.fetch(anna, bert)
        assert anna.offsets == [(0, 0)]
        assert bert.offsets == [(0, cut)]
    assert paths[0].read_bytes() == model.content[0]
    assert model.said() == ["tiny from anna: it broke off"]


async def test_one_peer_that_is_cut_again_and_again(sharded: Model) -> None:
    async with peer("anna", meddling(sharded.honest(), limit=70_000)) as anna:
        paths = await sharded.fetch(anna)
        assert anna.bytes_asked > sharded.size_bytes
    assert [path.read_bytes() for path in paths] == sharded.content


@pytest.mark.parametrize("cut", [1000, PIECE_BYTES, 300_000])
async def test_a_later_run_goes_on_where_one_failed(model: Model, cut: int) -> None:
    dead = asyncio.Event()

    async def once(stream: ByteStream, request: dict[str, Any]) -> None:
        if dead.is_set():
            raise ConnectionResetError
        if request["ask"] == "bytes":
            dead.set()
        await meddling(model.honest(), limit=cut)(stream, request)

    async with peer("anna", once) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna)
    assert caught.value.message.startswith("tiny could not be fetched: anna: it broke off")
    assert [path.stat().st_size for path in model.parts()] == [cut]
    async with peer("bert", model.honest()) as bert:
        paths = await model.fetch(bert)
        assert bert.offsets == [(0, cut)]
    assert paths[0].read_bytes() == model.content[0]
    assert model.names() == ["tiny.gguf"]


async def test_a_cancelled_fetch_leaves_what_it_has(model: Model) -> None:
    cut = 10 * PIECE_BYTES
    async with (
        peer("anna", meddling(model.honest(), limit=cut, stay=True)) as anna,
        peer("bert", model.honest()) as bert,
    ):
        task = asyncio.create_task(model.fetch(anna), name="fetch")
        async with asyncio.timeout(10):
            while not any(step.done == cut for step in model.steps):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [path.stat().st_size for path in model.parts()] == [cut]
        paths = await model.fetch(bert)
        assert bert.offsets == [(0, cut)]
    assert paths[0].read_bytes() == model.content[0]


CHILD = """
import asyncio, sys
from pathlib import Path
from mesh_llm.models.fetch import Wanted, fetch
from tests.support.file_peer import connect

async def never(paths):
    raise AssertionError

asyncio.run(fetch(
    Wanted(fingerprint=sys.argv[1], name="tiny"), Path(sys.argv[2]),
    sources=lambda: [connect("anna", int(sys.argv[3]))], verify=never,
    progress=lambda step: print(step.done, flush=True), events=print,
))
"""


async def test_a_killed_fetch_leaves_what_it_has(model: Model) -> None:
    cut = 10 * PIECE_BYTES
    async with (
        peer("anna", meddling(model.honest(), limit=cut, stay=True)) as anna,
        peer("bert", model.honest()) as bert,
    ):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, model.fingerprint, str(model.folder), str(anna.port)),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        async with asyncio.timeout(60):
            while await child.stdout.readline() != f"{cut}\n".encode():
                pass
            child.send_signal(signal.SIGKILL)
            assert await child.wait() == -signal.SIGKILL
        assert [path.stat().st_size for path in model.parts()] == [cut]
        paths = await model.fetch(bert)
        assert bert.offsets == [(0, cut)]
    assert paths[0].read_bytes() == model.content[0]
    assert model.names() == ["tiny.gguf"]


async def test_what_was_damaged_on_the_disk_meanwhile_is_fetched_again(model: Model) -> None:
    cut = 5 * PIECE_BYTES + 1000
    async with peer("anna", meddling(model.honest(), limit=cut, stay=True)) as anna:
        with pytest.raises(DownloadFailed):
            await model.fetch(anna, times=HASTY)
    (part,) = model.parts()
    with part.open("r+b") as file:
        file.seek(3 * PIECE_BYTES + 17)
        file.write(b"\xff\x00\xff")
    async with peer("bert", model.honest()) as bert:
        paths = await model.fetch(bert)
        assert bert.offsets == [(0, 3 * PIECE_BYTES)]
    assert paths[0].read_bytes() == model.content[0]


async def test_a_fetch_that_only_ever_breaks_off_ends(model: Model) -> None:
    async with peer("anna", meddling(model.honest(), limit=1)) as anna:
        with pytest.raises(DownloadFailed):
            await model.fetch(anna)
        assert anna.offsets == [(0, index) for index in range(100)]
    assert [path.stat().st_size for path in model.parts()] == [100]


# -- damage ---------------------------------------------------------------------------------------


def flip(position: int) -> Callable[[int, bytes], bytes]:
    """Alters one byte of a body."""

    def change(offset: int, data: bytes) -> bytes:
        at = position - offset
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change


@pytest.mark.parametrize("position", [0, PIECE_BYTES + 5, -1])
async def test_a_damaged_piece_is_thrown_away_and_fetched_elsewhere(model: Model, position: int) -> None:
    position %= model.size_bytes
    async with (
        peer("anna", meddling(model.honest(), change=flip(position))) as anna,
        peer("bert", model.honest()) as bert,
    ):
        paths = await model.fetch(anna, bert)
        assert len(anna.offsets) == 1
        assert bert.offsets == [(0, position // PIECE_BYTES * PIECE_BYTES)]
    assert paths[0].read_bytes() == model.content[0]
    assert model.said() == ["tiny from anna: a piece arrived damaged and was thrown away"]


async def test_an_honest_peer_is_not_blamed_for_what_another_began(model: Model) -> None:
    begun = meddling(model.honest(), limit=1000, change=flip(10))
    async with peer("anna", begun) as anna, peer("bert", model.honest()) as bert:
        paths = await model.fetch(anna, bert)
        assert (anna.offsets, bert.offsets) == ([(0, 0)], [(0, 1000), (0, 0)])
    assert paths[0].read_bytes() == model.content[0]
    assert model.said() == [
        "tiny from anna: it broke off",
        "tiny from bert: a piece that another one began was damaged and is fetched again",
    ]


async def test_damage_from_the_only_peer_is_said(model: Model) -> None:
    async with peer("anna", meddling(model.honest(), change=flip(3))) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna)
    assert caught.value.message == (
        "tiny could not be fetched: anna: a piece arrived damaged and was thrown away"
    )
    assert [path.stat().st_size for path in model.parts()] == [0]


async def test_another_model_under_the_same_fingerprint_is_thrown_away(model: Model, tmp_path: Path) -> None:
    other = tiny_gguf.write(tmp_path / "source" / "other.gguf", "llama", hidden=128, seed=1)
    forged = honest(model.cache, model.fingerprint, (other,))
    async with (
        peer("anna", forged) as anna,
        peer("carl", forged) as carl,
        peer("bert", model.honest()) as bert,
    ):
        paths = await model.fetch(anna, carl, bert)
        assert (anna.bytes_asked, carl.bytes_asked) == (other.stat().st_size, 0)
    assert paths == (model.folder / "tiny.gguf",)
    assert paths[0].read_bytes() == model.content[0]
    assert model.names() == ["tiny.gguf"]
    assert model.said()[0].startswith("tiny from anna: what arrived is not the model and was thrown away: ")
    assert model.said()[1] == "tiny from carl: it offers the same wrong copy"


async def test_what_is_no_model_is_thrown_away(model: Model) -> None:
    async def verify(paths: tuple[Path, ...]) -> Fingerprint:
        raise ModelError("the file is not a GGUF file")

    async with peer("anna", model.honest()) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna, verify=verify)
    assert caught.value.message == (
        "tiny could not be fetched: anna: what arrived is not the model and was thrown away: "
        "the file is not a GGUF file"
    )
    assert model.parts() == []


# -- hostile sources ------------------------------------------------------------------------------


def manifest(**changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": "tiny.gguf",
        "piece_bytes": PIECE_BYTES,
        "files": [{"size": 5, "pieces": hashlib.sha256(b"false").hexdigest()}],
    }
    return told | changes


def lines(*messages: Any) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def files(size: Any, pieces: Any) -> dict[str, Any]:
    return manifest(files=[{"size": size, "pieces": pieces}])


HASH = "0" * 64
HOSTILE_MANIFESTS: dict[str, tuple[bytes, str]] = {
    "negative size": (lines(files(-1, "")), "an impossible size"),
    "no size": (lines(files(0, "")), "an impossible size"),
    "huge size": (lines(files(1 << 62, HASH)), "an impossible size"),
    "a size that is a truth": (lines(files(True, HASH)), "an impossible size"),
    "a size that is a fraction": (lines(files(5.0, HASH)), "an impossible size"),
    "too few hashes": (lines(files(PIECE_BYTES + 1, HASH)), "hashes that do not belong"),
    "too many hashes": (lines(files(5, HASH * 2)), "hashes that do not belong"),
    "hashes of other letters": (lines(files(5, "G" * 64)), "hashes that do not belong"),
    "hashes in a list": (lines(files(5, [HASH])), "hashes that do not belong"),
    "no files": (lines(manifest(files=[])), "an impossible number of files"),
    "very many files": (
        lines(manifest(files=[{"size": 1, "pieces": HASH}] * 1025)),
        "an impossible number of files",
    ),
    "very many pieces": (
        lines(manifest(piece_bytes=4096, files=[{"size": 4096 * 33_000, "pieces": HASH * 33_000}] * 2)),
        "an impossible size",
    ),
    "files that are none": (lines(manifest(files=["x"])), "an impossible size"),
    "pieces of nothing": (lines(manifest(piece_bytes=0)), "pieces of an impossible size"),
    "no name": (lines(manifest(name=None)), "no usable name"),
    "an endless name": (lines(manifest(name="x" * 2000)), "no usable name"),
    "no JSON": (b"GGUF\n", "something unreadable"),
    "deep JSON": (b"[" * 100_000 + b"\n", "something unreadable"),
    "no object": (lines([1]), "something unreadable"),
    "an endless line": (b"x" * (7 << 20), "a line without an end"),
    "hashing backwards": (lines({"hashing": -1}), "something unreadable"),
    "nothing": (b"", "it broke off"),
    "half": (lines(manifest())[:-10], "it broke off"),
    "a refusal that draws": (lines({"refused": "no\x1b[2J"}), "no?[2J"),
}


def sending(data: bytes) -> Answer:
    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        await stream.write(data)
        await stream.finish()
        while await stream.read(1 << 16):
            pass

    return answer


@pytest.mark.parametrize("case", HOSTILE_MANIFESTS)
async def test_an_impossible_manifest_is_refused(model: Model, case: str) -> None:
    data, reason = HOSTILE_MANIFESTS[case]
    async with peer("mallory", sending(data)) as mallory, peer("bert", model.honest()) as bert:
        paths = await model.fetch(mallory, bert)
    assert paths[0].read_bytes() == model.content[0]
    assert reason in model.said()[0]
    assert model.names() == ["tiny.gguf"]


async def test_a_size_that_is_not_the_known_one_is_refused(model: Model) -> None:
    async with peer("mallory", sending(lines(manifest()))) as mallory, peer("bert", model.honest()) as bert:
        await model.fetch(mallory, bert, size_bytes=model.size_bytes)
        assert mallory.bytes_asked == 0
    assert model.said() == [f"tiny from mallory: its copy has 5 bytes, not {model.size_bytes:,}"]


def body(data: bytes) -> Answer:
    """Tells the manifest of the file "false", and answers its bytes with `data`."""

    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        await sending(data if request["ask"] == "bytes" else lines(manifest()))(stream, request)

    return answer


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lines({"bytes": 4}) + b"fals", "it answers another question"),
        (lines({"bytes": -1}), "it answers another question"),
        (lines({"bytes": "5"}) + b"false", "it answers another question"),
        (lines({}) + b"false", "it answers another question"),
        (b"\xff\xfe\n", "something unreadable"),
        (b"y" * 100_000, "a line without an end"),
        (lines({"bytes": 5}) + b"fals", "it broke off"),
        (lines({"bytes": 5}) + b"wrong", "arrived damaged"),
        (lines({"bytes": 5}) + b"false" * 100_000, "what arrived is not the model"),
        (lines({"refused": "its file has another size"}), "its file has another size"),
    ],
)
async def test_an_impossible_body_is_refused(model: Model, data: bytes, reason: str) -> None:
    async with peer("mallory", body(data)) as mallory, peer("bert", model.honest()) as bert:
        paths = await model.fetch(mallory, bert)
    assert paths[0].read_bytes() == model.content[0]
    assert reason in model.said()[0]
    assert model.names() == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../../etc/cron.d/evil.gguf", "evil.gguf"),
        ("/etc/passwd", "passwd.gguf"),
        ("..", "model.gguf"),
        ("", "model.gguf"),
        ("a\0b.gguf", "b.gguf"),
        ("..\\..\\evil.gguf", "evil.gguf"),
        (".bashrc", "bashrc.gguf"),
        ("-rf.gguf", "rf.gguf"),
        ("tiny.gguf\n/x y$(z).gguf", "x_y_z_.gguf"),
        ("naïve\u202e.gguf", "na_ve_.gguf"),
        ("x" * 1000, "x" * 120 + ".gguf"),
        ("of-three-00001-of-00003.gguf", "of-three.gguf"),
    ],
)
async def test_a_name_is_never_a_path(model: Model, name: str, expected: str) -> None:
    false = Fingerprint(hashlib.sha256(b"false").hexdigest())
    model.fingerprint = false
    told = lines(manifest(name=name))

    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        data = lines({"bytes": 5}) + b"false" if request["ask"] == "bytes" else told
        await sending(data)(stream, request)

    async with peer("mallory", answer) as mallory:
        paths = await model.fetch(mallory)
    assert paths == (model.folder / expected,)
    assert model.names() == [expected]


async def forever(stream: ByteStream, data: bytes, pause_s: float) -> None:
    while True:
        await stream.write(data)
        await asyncio.sleep(pause_s)


SLOW: dict[str, tuple[bytes | None, bytes]] = {
    "says nothing": (None, b""),
    "drips its manifest": (None, b" "),
    "hashes for ever": (None, lines({"hashing": 1})),
    "sends nothing": (lines({"bytes": 5}), b""),
}


@pytest.mark.parametrize("case", SLOW)
async def test_a_source_that_only_holds_on_is_left(model: Model, case: str) -> None:
    head, drip = SLOW[case]

    async def slow(stream: ByteStream, request: dict[str, Any]) -> None:
        if head is not None and request["ask"] == "manifest":
            await sending(lines(manifest()))(stream, request)
            return
        await stream.write(head or b"")
        await forever(stream, drip, 0.05)

    async with peer("mallory", slow) as mallory, peer("bert", model.honest()) as bert:
        paths = await model.fetch(mallory, bert, times=FetchTimes(stall_s=0.5, pause_s=0.0))
        assert len(mallory.requests) <= 2
    assert paths[0].read_bytes() == model.content[0]
    assert model.said() == ["tiny from mallory: it sends nothing, or hardly anything"]


async def test_a_source_that_drips_bytes_is_left_and_its_bytes_are_kept(model: Model) -> None:
    async def drip(stream: ByteStream, request: dict[str, Any]) -> None:
        if request["ask"] == "manifest":
            await model.honest()(stream, request)
            return
        await stream.write(lines({"bytes": request["length"]}))
        for byte in model.content[0]:
            await stream.write(bytes([byte]))
            await asyncio.sleep(0.01)

    async with peer("mallory", drip) as mallory, peer("bert", model.honest()) as bert:
        paths = await model.fetch(mallory, bert, times=FetchTimes(stall_s=0.5, pause_s=0.0))
        ((_, offset),) = bert.offsets
        assert 0 < offset < 1000
    assert paths[0].read_bytes() == model.content[0]


async def test_a_source_that_cannot_be_reached_is_tried_three_times(model: Model) -> None:
    tries = 0

    async def gone(stream: ByteStream, request: dict[str, Any]) -> None:
        nonlocal tries
        tries += 1
        raise ConnectionResetError

    async with peer("anna", gone) as anna:
        with pytest.raises(DownloadFailed):
            await model.fetch(anna)
    assert tries == 3
    with pytest.raises(DownloadFailed) as caught:
        await model.fetch(anna)
    assert "tiny could not be fetched: anna: it cannot be reached" in caught.value.message
    with pytest.raises(DownloadFailed) as caught:
        await model.fetch()
    assert caught.value.message == "tiny could not be fetched: no node that can be reached has it"


async def test_a_source_that_comes_later_is_used(model: Model) -> None:
    async with AsyncExitStack() as stack:
        anna = await stack.enter_async_context(peer("anna", meddling(model.honest(), limit=1000)))
        bert = await stack.enter_async_context(peer("bert", model.honest()))

        def sources() -> list[Source]:
            return [bert.source] if len(anna.offsets) else [anna.source]

        paths = await fetch(
            Wanted(fingerprint=model.fingerprint, name="tiny"),
            model.folder,
            sources=sources,
            verify=digest_of,
            progress=model.steps.append,
            events=model.events.append,
            times=QUICK,
        )
    assert paths[0].read_bytes() == model.content[0]
    assert bert.offsets == [(0, 1000)]


# -- the disk -------------------------------------------------------------------------------------


async def test_a_full_disk_is_said_before_a_byte_is_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = list(os.statvfs("/"))
    facts[1], facts[4] = 4096, 65_600  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(facts))
    async with peer("anna", model.honest()) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna)
        assert anna.bytes_asked == 0
    assert caught.value.message == (
        f"tiny could not be fetched: anna: {model.size_bytes / 1e6:.1f} MB are still to come, "
        f"and {model.folder} has room for 0.3 MB"
    )
    assert caught.value.hint == "free some space, or name another folder in MESH_LLM_MODELS"


async def test_a_folder_that_cannot_be_written_is_said(model: Model) -> None:
    model.folder.write_text("a file")
    async with peer("anna", model.honest()) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna)
    assert caught.value.message == f"cannot write to {model.folder}: File exists"


async def test_a_run_that_ended_between_two_names_is_completed(
    sharded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.link

    def link(source: Path, target: Path) -> None:
        if target.name == "tiny-00002-of-00003.gguf":
            raise OSError(errno.EIO, "Input/output error")
        original(source, target)

    async with peer("anna", sharded.honest()) as anna:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            with pytest.raises(DownloadFailed) as caught:
                await sharded.fetch(anna)
        assert caught.value.message == f"cannot write to {sharded.folder}: Input/output error"
        assert (sharded.folder / "tiny-00001-of-00003.gguf").exists()
        paths = await sharded.fetch(anna)
        assert anna.bytes_asked == sharded.size_bytes
    assert [path.read_bytes() for path in paths] == sharded.content
    assert sharded.names() == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


async def test_a_file_system_on_which_a_file_has_one_name(
    sharded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    sharded.folder.mkdir()
    (sharded.folder / "tiny-00002-of-00003.gguf").write_bytes(b"mine")
    async with peer("anna", sharded.honest()) as anna:
        paths = await sharded.fetch(anna)
    assert [path.name for path in paths] == [f"tiny-2-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert [path.read_bytes() for path in paths] == sharded.content
    assert (sharded.folder / "tiny-00002-of-00003.gguf").read_bytes() == b"mine"


# -- the source's side ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"ask": "manifest", "fingerprint": "other"}, "it does not have the model"),
        ({"ask": "manifest", "fingerprint": 5}, "it does not have the model"),
        ({"ask": "manifest"}, "it does not have the model"),
        ({"ask": "everything"}, "it does not know what that asks for"),
        ({}, "it does not know what that asks for"),
        ({"ask": "bytes", "file": 1}, "it has no such part of the model"),
        ({"ask": "bytes", "file": -1}, "it has no such part of the model"),
        ({"ask": "bytes", "file": "0"}, "it has no such part of the model"),
        ({"ask": "bytes", "offset": -1}, "it has no such part of the model"),
        ({"ask": "bytes", "offset": 1 << 70}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 0}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 1 << 40}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 1.5}, "it has no such part of the model"),
        ({"ask": "bytes", "size": 10, "length": 5}, "its file has another size"),
    ],
)
async def test_an_impossible_request_is_refused(model: Model, request_: dict[str, Any], reason: str) -> None:
    whole: dict[str, Any] = {"file": 0, "size": model.size_bytes, "offset": 0, "length": 10}
    if request_.get("ask") != "manifest":
        whole["fingerprint"] = model.fingerprint
    async with (
        peer("anna", model.honest()) as anna,
        connect("anna", anna.port).open(whole | request_) as stream,
    ):
        answer = b""
        while more := await stream.read(1 << 16):
            answer += more
    assert json.loads(answer) == {"refused": reason}


async def test_a_source_sends_so_many_files_at_once_and_no_more(model: Model) -> None:
    held = {"ask": "bytes", "file": 0, "size": model.size_bytes, "offset": 0, "length": model.size_bytes}
    request = {**held, "fingerprint": model.fingerprint}
    # So slow that the first chunks are the last ones for the length of this test.
    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=1000)
    async with peer("anna", model.honest(throttle=throttle)) as anna, AsyncExitStack() as stack:
        source = connect("anna", anna.port)
        for _ in range(4):
            stream = await stack.enter_async_context(source.open(request))
            assert (await stream.read(14)).startswith(b'{"bytes": ')
        fifth = await stack.enter_async_context(source.open(request))
        assert json.loads(await fifth.read(1000)) == {"refused": "it sends as many files as it can at once"}


async def test_hashes_are_computed_once_per_version_of_a_file(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    original = digests_module.hash_range

    def counting(path: Path, start: int, size: int) -> Any:
        hashed.append(start)
        return original(path, start, size)

    async def silent(done: int) -> None:
        pass

    monkeypatch.setattr(digests_module, "hash_range", counting)
    pieces = -(-model.size_bytes // PIECE_BYTES)
    for _ in range(2):
        digests = Digests(tmp_path / "cache", piece_bytes=PIECE_BYTES)
        both = await asyncio.gather(
            *(digests.of(model.files[0], busy=lambda: False, beat=silent) for _ in range(2))
        )
        assert both[0] == both[1]
    assert len(hashed) == pieces
    os.utime(model.files[0], ns=(0, 0))
    again = await digests.of(model.files[0], busy=lambda: False, beat=silent)
    assert again == both[0]
    assert len(hashed) == 2 * pieces


async def test_a_source_that_still_hashes_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "OFFER_BEAT_S", 0.0)
    async with peer("anna", model.honest()) as anna:
        await model.fetch(anna, size_bytes=model.size_bytes)
    pieces = -(-model.size_bytes // PIECE_BYTES)
    ends = [min(index * PIECE_BYTES, model.size_bytes) for index in range(1, pieces + 1)]
    assert model.steps[:pieces] == [
        Progress(what="anna reads its copy of tiny", done=end, total=model.size_bytes, unit="bytes")
        for end in ends
    ]
    assert model.steps[pieces].what == "Fetching tiny"


async def test_those_who_wait_for_hashes_hear_how_far_they_are(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one to ask is held up in its first beat, until the second one has heard the same."""
    monkeypatch.setattr(digests_module, "OFFER_BEAT_S", 0.0)
    digests = Digests(tmp_path / "cache", piece_bytes=PIECE_BYTES)
    held_at: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    heard = asyncio.Event()

    async def first(done: int) -> None:
        if not held_at.done():
            held_at.set_result(done)
        async with asyncio.timeout(10):
            await heard.wait()

    async def second(done: int) -> None:
        if held_at.done() and held_at.result() == done:
            heard.set()

    async with asyncio.timeout(20):
        one, two = await asyncio.gather(
            *(digests.of(model.files[0], busy=lambda: False, beat=beat) for beat in (first, second))
        )
    assert heard.is_set()
    assert one == two


async def test_a_peer_that_does_not_read_is_left(tmp_path: Path) -> None:
    size = 64 << 20
    with (tmp_path / "large.gguf").open("wb") as file:
        file.truncate(size)
    answer = honest(tmp_path, Fingerprint("large"), (tmp_path / "large.gguf",), stall_s=0.3)
    left: asyncio.Queue[None] = asyncio.Queue()

    async def noting(stream: ByteStream, request: dict[str, Any]) -> None:
        await answer(stream, request)
        left.put_nowait(None)

    request = {"ask": "bytes", "fingerprint": "large", "file": 0, "size": size, "offset": 0, "length": size}
    async with peer("anna", noting) as anna, AsyncExitStack() as stack:
        source = connect("anna", anna.port)
        for _ in range(4):
            await stack.enter_async_context(source.open(request))
        async with asyncio.timeout(30):
            for _ in range(4):
                await left.get()
        fifth = await stack.enter_async_context(source.open({**request, "length": 1}))
        assert await fifth.read(100) == b'{"bytes": 1}\n\0'


# -- the throttle ---------------------------------------------------------------------------------


def test_a_throttle_keeps_its_rate() -> None:
    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=1000)
    now, sent = 100.0, 0
    while sent < 50_000:
        now += throttle.reserve(500, now)
        sent += 500
    # The first chunk goes at once, and ten milliseconds may be caught up with.
    assert now == pytest.approx(100.0 + 49.5 - 0.01)


def test_an_idle_time_earns_no_burst() -> None:
    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=1000)
    assert throttle.reserve(500, 0.0) == 0
    assert throttle.reserve(500, 1000.0) == 0
    assert throttle.reserve(500, 1000.0) == pytest.approx(0.49)


def test_a_throttle_follows_its_node() -> None:
    busy = False
    throttle = Throttle(busy=lambda: busy, busy_bytes_per_s=1000, idle_bytes_per_s=100_000)
    now = 0.0
    for _ in range(100):
        now += throttle.reserve(1000, now)
    assert now == pytest.approx(0.98)
    busy = True
    began = now
    for _ in range(10):
        now += throttle.reserve(1000, now)
    assert now - began == pytest.approx(9.01)
    busy = False
    began = now
    for _ in range(10):
        now += throttle.reserve(1000, now)
    assert now - began == pytest.approx(1.09)


def test_without_answers_under_way_there_is_no_limit() -> None:
    throttle = Throttle(busy=lambda: False)
    assert [throttle.reserve(1 << 20, 5.0) for _ in range(1000)] == [0.0] * 1000


async def test_a_throttled_source_takes_its_time(model: Model) -> None:
    clock = asyncio.get_running_loop().time
    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=4 * model.size_bytes)
    async with peer("anna", model.honest(throttle=throttle)) as anna:
        began = clock()
        await model.fetch(anna)
        # Less than a quarter second by the last chunk, which is not waited for.
        assert clock() - began > 0.25 * (1 - (256 << 10) / model.size_bytes) - 0.02


# -- what is left over ----------------------------------------------------------------------------


def test_what_a_dead_download_left_is_removed(tmp_path: Path) -> None:
    for name in (".incoming-abc", ".incoming-fetch-old", ".incoming-fetch-new", "incoming-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / ".incoming-file").write_text("not ours")
    fortnight_s = 14 * 24 * 3600
    now = (tmp_path / ".incoming-fetch-new").stat().st_mtime + fortnight_s - 10
    for path in (tmp_path / ".incoming-fetch-old" / "file", tmp_path / ".incoming-fetch-old"):
        os.utime(path, (now - fortnight_s - 10,) * 2)
    with incoming.scratch(tmp_path) as held:
        (held / "wheel").write_bytes(b"x")
        incoming.clean(tmp_path, now=now)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [held.name, ".incoming-fetch-new", ".incoming-file", "incoming-mine"]
        )
        assert (held / "wheel").exists()
    assert not held.exists()


async def test_a_fetch_under_way_is_not_removed_however_old(tmp_path: Path) -> None:
    async with incoming.resumable(tmp_path, "a") as held:
        incoming.clean(tmp_path, now=held.stat().st_mtime + 1e9)
        assert held.exists()
    incoming.clean(tmp_path, now=held.stat().st_mtime + 1e9)
    assert not held.exists()


async def test_the_scratch_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\nfrom mesh_llm.models import incoming\n"
        "with incoming.scratch(pathlib.Path(sys.argv[1])) as path:\n"
        "    print(path, flush=True)\n    sys.stdin.read()\n"
    )
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(tmp_path)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    async with asyncio.timeout(60):
        left = Path((await child.stdout.readline()).decode().strip())
        incoming.clean(tmp_path, now=0.0)
        assert left.is_dir()
        child.kill()
        await child.wait()
    incoming.clean(tmp_path, now=0.0)
    assert list(tmp_path.iterdir()) == []
