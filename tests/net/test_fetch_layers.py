"""Some layers from peers: exactly their pieces, over cuts, restarts, other sources and hostile ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models.layer_ranges import Extent, Piece, Share, needed, pieces_of, samples, tensor_table
from mesh_llm.peer_fetch import layer_fetch
from mesh_llm.peer_fetch.channel import ByteStream
from mesh_llm.peer_fetch.layer_fetch import Held, fetch_layers
from mesh_llm.peer_fetch.sources import FetchTimes, Source, Wanted
from mesh_llm.peer_fetch.sparse_files import NoHoles, SparseFiles
from mesh_llm.transport.network import Stream
from mesh_llm.transport.peer import Peer as Connection
from mesh_llm.types import Event, Fingerprint, Progress
from tests.support import tiny_gguf
from tests.support.fetching import manifest_digest
from tests.support.file_peer import PIECE_BYTES, Answer, Peer, honest, meddling, only_once, peer
from tests.support.members import mesh_of_members

Made = tuple[tuple[Path, ...], dict[str, Any]]
"""Files, and what the engine says of them."""
LAYERS = 12
QUICK = FetchTimes(stall_s=30.0, pause_s=0.0)
MIDDLE = Share(first=4, last=7, head=False)
LAST = Share(first=10, last=12, head=True)


class Model:
    """A model at some peer's; `folder` is the receiver's."""

    def __init__(self, files: tuple[Path, ...], document: dict[str, Any], tmp: Path) -> None:
        self.files, self.document = files, document
        self.fingerprint = Fingerprint(document["fingerprint"])
        self.content = [file.read_bytes() for file in files]
        self.table = tensor_table(document)
        self.cache, self.folder = tmp / "cache", tmp / "receiver"
        self.folder.mkdir()
        self.events: list[Event] = []
        self.steps: list[Progress] = []

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.content))

    def honest(self, **options: Any) -> Answer:
        return honest(self.cache, self.fingerprint, self.files, **options)

    async def read(self, path: Path) -> dict[str, Any]:
        """What the engine would say, without a process for it: headers and samples have to be right."""
        count = len(self.files)
        names = [path.name.replace("-00001-of", f"-{number:05d}-of") for number in range(1, count + 1)]
        files = [path.with_name(name) for name in names]
        got = [file.read_bytes() for file in files]

        def same(extents: Iterable[Extent]) -> bool:
            return all(
                got[each.file][each.offset : each.end] == self.content[each.file][each.offset : each.end]
                for each in extents
            )

        if not same(self.table.headers):
            raise ModelError("it is not a readable GGUF file")
        right = same(samples(self.table))
        listed = [
            {**entry, "path": str(file)} for entry, file in zip(self.document["files"], files, strict=True)
        ]
        return {**self.document, "files": listed, "fingerprint": self.fingerprint if right else "0" * 32}

    async def fetch(
        self,
        share: Share | None,
        *sources: Peer | Source,
        digest: str = "",
        read: layer_fetch.Read | None = None,
    ) -> Held:
        return await fetch_layers(
            Wanted(fingerprint=self.fingerprint, name="tiny", digest=digest),
            share,
            self.folder,
            sources=lambda: [each.source if isinstance(each, Peer) else each for each in sources],
            read=read or self.read,
            progress=self.steps.append,
            events=self.events.append,
            times=QUICK,
        )

    def pieces(self, *shares: Share) -> frozenset[Piece]:
        wanted = [self.table.tensors[name] for share in shares for name in needed(self.table, share)]
        return pieces_of([*wanted, *self.table.headers], PIECE_BYTES)

    def size_of(self, pieces: frozenset[Piece]) -> int:
        sizes = (len(self.content[piece.file]) - piece.index * PIECE_BYTES for piece in pieces)
        return sum(min(PIECE_BYTES, size) for size in sizes)

    def check(self, held: Held, *shares: Share) -> None:
        """Every byte of these layers is right, and the rest is holes but for samples."""
        assert held.document["fingerprint"] == self.fingerprint
        assert set(held.layers) >= {layer for share in shares for layer in range(share.first, share.last)}
        got = [path.read_bytes() for path in held.paths]
        assert [len(each) for each in got] == [len(each) for each in self.content]
        for name in held.tensors:
            where = self.table.tensors[name]
            part = slice(where.offset, where.end)
            assert got[where.file][part] == self.content[where.file][part], name
        for share in shares:
            assert set(needed(self.table, share)) <= set(held.tensors)
            assert held.has(share)

    def said(self) -> list[str]:
        return [event.text for event in self.events]

    @property
    def own(self) -> Path:
        (found,) = (self.folder / ".layers").iterdir()
        return found


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("one") / "tiny.gguf"
    return made([tiny_gguf.write(path, "llama", layers=LAYERS, hidden=192, vocabulary=4096)])


@pytest.fixture(scope="module")
def three_files(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("three") / "tiny.gguf"
    return made(tiny_gguf.write_shards(path, 3, "llama", layers=LAYERS, hidden=192))


def made(files: list[Path]) -> Made:
    return tuple(files), asyncio.run(read_gguf(files[0]))


@pytest.fixture
def model(one_file: Made, tmp_path: Path) -> Model:
    return Model(*one_file, tmp_path)


@pytest.fixture
def sharded(three_files: Made, tmp_path: Path) -> Model:
    return Model(*three_files, tmp_path)


def sample_bytes_asked(peer: Peer) -> int:
    asked = [each["ranges"] for each in peer.requests if each["ask"] == "ranges"]
    return sum(length for ranges in asked for _, length in ranges)


# -- one source -----------------------------------------------------------------------------------


async def test_layers_arrive_and_nothing_else(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        held = await model.fetch(MIDDLE, anna, read=read_gguf)
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE))
        assert anna.bytes_asked + sample_bytes_asked(anna) < model.size_bytes / 2
    model.check(held, MIDDLE)
    assert held.layers == (4, 5, 6)
    assert "token_embd.weight" not in held.tensors
    # Blocks, without the holes.
    assert sum(path.stat().st_blocks * 512 for path in held.paths) < model.size_bytes / 2
    assert [path.name for path in model.folder.iterdir()] == [".layers"]
    assert model.events == []
    assert model.steps[-1].what == "Fetching layers of tiny"
    assert model.steps[-1].done == model.steps[-1].total


async def test_the_head_of_a_tied_model_is_its_embedding(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        held = await model.fetch(LAST, anna)
    model.check(held, LAST)
    head = "token_embd.weight" if "output.weight" not in model.table.tensors else "output.weight"
    assert head in held.tensors


async def test_layers_over_several_files(sharded: Model) -> None:
    async with peer("anna", sharded.honest()) as anna:
        held = await sharded.fetch(MIDDLE, anna, read=read_gguf)
        assert anna.bytes_asked == sharded.size_of(sharded.pieces(MIDDLE) | {Piece(i, 0) for i in range(3)})
    sharded.check(held, MIDDLE)
    names = [path.name for path in held.paths]
    assert [name[-len("-00001-of-00003.gguf") :] for name in names] == [
        f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]


async def test_first_what_tells_the_model_then_layers(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        known = await model.fetch(None, anna)
        assert known.layers == ()
        assert known.document == {**model.document, "files": known.document["files"]}
        assert anna.bytes_asked == model.size_of(model.pieces())
        anna.requests.clear()
        held = await model.fetch(MIDDLE, anna)
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE) - model.pieces())
    model.check(held, MIDDLE)


async def test_other_layers_are_added_in_place(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        first = await model.fetch(MIDDLE, anna)
        inode = first.paths[0].stat().st_ino
        anna.requests.clear()
        second = await model.fetch(LAST, anna)
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE, LAST) - model.pieces(MIDDLE))
        assert sample_bytes_asked(anna) == 0
        # Nothing is asked of anybody for what is there.
        anna.requests.clear()
        third = await model.fetch(MIDDLE, anna)
        assert anna.requests == []
    assert second.paths == first.paths == third.paths
    assert second.paths[0].stat().st_ino == inode
    model.check(second, MIDDLE, LAST)
    model.check(third, MIDDLE, LAST)


async def test_what_is_there_is_found_without_asking(model: Model) -> None:
    assert await layer_fetch.find(model.folder, model.fingerprint, read=model.read) is None
    async with peer("anna", model.honest()) as anna:
        held = await model.fetch(MIDDLE, anna)
    found = await layer_fetch.find(model.folder, model.fingerprint, read=model.read)
    assert found == held
    assert await layer_fetch.find(model.folder, Fingerprint("0" * 32), read=model.read) is None


async def test_two_fetches_at_once_share_the_files(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        one, other = await asyncio.gather(model.fetch(MIDDLE, anna), model.fetch(LAST, anna))
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE, LAST))
    assert one.paths == other.paths
    latest = max(one, other, key=lambda held: len(held.tensors))
    model.check(latest, MIDDLE, LAST)
    assert model.said() == ["tiny is being fetched by another node on this machine"]


# -- cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 4000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 300_000])
async def test_the_next_peer_goes_on_where_one_was_cut(model: Model, cut: int) -> None:
    async with (
        peer("anna", meddling(model.honest(), limit=cut)) as anna,
        peer("bert", model.honest()) as bert,
    ):
        held = await model.fetch(MIDDLE, anna, bert)
        whole = model.size_of(model.pieces(MIDDLE))
        # What was complete is not fetched twice.
        assert bert.bytes_asked <= whole - cut // PIECE_BYTES * PIECE_BYTES
    model.check(held, MIDDLE)
    assert "tiny from anna: it stopped early" in model.said()


async def test_a_later_run_goes_on_where_one_failed(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        await model.fetch(None, anna)
    cut = 5 * PIECE_BYTES + 100
    async with peer("bert", only_once(meddling(model.honest(), limit=cut))) as bert:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(MIDDLE, bert)
    assert caught.value.message.startswith("tiny could not be fetched: bert: ")
    found = await layer_fetch.find(model.folder, model.fingerprint, read=model.read)
    assert found is not None
    assert not found.has(MIDDLE)
    kept = SparseFiles.load(model.own, model.fingerprint)
    assert kept is not None
    assert kept.held > model.pieces()
    async with peer("carl", model.honest()) as carl:
        held = await model.fetch(MIDDLE, carl)
        assert carl.bytes_asked == model.size_of(model.pieces(MIDDLE) - frozenset(kept.held))
    model.check(held, MIDDLE)


async def test_a_cancelled_fetch_leaves_what_it_has(model: Model) -> None:
    cut = 4 * PIECE_BYTES
    async with (
        peer("anna", model.honest()) as anna,
        peer("bert", meddling(model.honest(), limit=cut, stay=True)) as bert,
    ):
        await model.fetch(None, anna)
        anna.requests.clear()
        task = asyncio.create_task(model.fetch(MIDDLE, bert), name="fetch")
        async with asyncio.timeout(30):
            while not any(
                step.what.startswith("Fetching layers") and step.done == cut for step in model.steps
            ):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        kept = SparseFiles.load(model.own, model.fingerprint)
        assert kept is not None
        assert kept.held > model.pieces()
        held = await model.fetch(MIDDLE, anna)
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE) - frozenset(kept.held))
    model.check(held, MIDDLE)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"held": 5}', '{"fingerprint": "x"}'],
)
async def test_a_damaged_record_is_not_believed(model: Model, damage: str) -> None:
    async with peer("anna", model.honest()) as anna:
        await model.fetch(MIDDLE, anna)
        (model.own / "layers.json").write_text(damage)
        assert await layer_fetch.find(model.folder, model.fingerprint, read=model.read) is None
        anna.requests.clear()
        held = await model.fetch(MIDDLE, anna)
        assert anna.bytes_asked == model.size_of(model.pieces(MIDDLE))
    model.check(held, MIDDLE)
    assert len(list(model.own.glob("*.gguf"))) == 1


async def test_a_file_that_lost_its_header_is_not_believed(model: Model) -> None:
    async with peer("anna", model.honest()) as anna:
        held = await model.fetch(MIDDLE, anna)
        with held.paths[0].open("r+b") as file:
            file.seek(2000)
            file.write(bytes(64))
        assert await layer_fetch.find(model.folder, model.fingerprint, read=model.read) is None
        again = await model.fetch(MIDDLE, anna)
    model.check(again, MIDDLE)
    # Under another name: a worker that has the old one open must not take it for this one.
    assert again.paths != held.paths


def test_a_record_of_pieces_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    made = SparseFiles(
        tmp_path, fingerprint=Fingerprint("f"), digest="d", piece_bytes=100, sizes=(250,), stem="model"
    )
    made.paths[0].write_bytes(bytes(250))
    made.held = {Piece(0, 0), Piece(0, 2)}
    made.prove()
    found = SparseFiles.load(tmp_path, Fingerprint("f"))
    assert found is not None
    assert (found.held, found.proven) == (made.held, True)
    made.held = {Piece(0, 3)}
    made.prove()
    assert SparseFiles.load(tmp_path, Fingerprint("f")) is None
    made.held = set()
    made.prove()
    made.paths[0].write_bytes(bytes(249))
    assert SparseFiles.load(tmp_path, Fingerprint("f")) is None


# -- hostile sources ------------------------------------------------------------------------------


async def test_a_damaged_piece_is_never_written(model: Model) -> None:
    def flip(offset: int, data: bytes) -> bytes:
        return bytes([data[0] ^ 1, *data[1:]]) if data else data

    async with peer("mallory", meddling(model.honest(), change=flip)) as mallory:
        with pytest.raises(DownloadFailed, match="a piece arrived damaged and was thrown away"):
            await model.fetch(MIDDLE, mallory)
    (path,) = model.own.glob("*.gguf")
    assert path.stat().st_blocks == 0
    async with (
        peer("mallory", meddling(model.honest(), change=flip)) as mallory,
        peer("bert", model.honest()) as bert,
    ):
        held = await model.fetch(MIDDLE, mallory, bert)
    model.check(held, MIDDLE)


async def test_samples_of_another_model_are_thrown_away(model: Model) -> None:
    async def false_samples(stream: ByteStream, request: dict[str, Any]) -> None:
        if request["ask"] == "ranges":
            total = sum(length for _, length in request["ranges"])
            await stream.write(b'{"bytes": %d}\n' % total + bytes(total))
            await stream.finish()
        else:
            await model.honest()(stream, request)

    async with peer("mallory", false_samples) as mallory, peer("bert", model.honest()) as bert:
        held = await model.fetch(MIDDLE, mallory, bert)
    model.check(held, MIDDLE)
    assert model.said()[0].startswith(
        "tiny from mallory: what arrived is not the model and was thrown away: "
    )


async def test_another_model_under_that_fingerprint_is_thrown_away(model: Model, tmp_path: Path) -> None:
    other = tiny_gguf.write(
        tmp_path / "other.gguf", "llama", layers=LAYERS, hidden=192, vocabulary=4096, seed=7
    )
    forged = honest(model.cache, model.fingerprint, (other,))
    async with peer("mallory", forged) as mallory, peer("bert", model.honest()) as bert:
        held = await model.fetch(MIDDLE, mallory, bert)
        assert mallory.bytes_asked < model.size_bytes / 2
    model.check(held, MIDDLE)


async def test_a_source_without_ranges_is_left(model: Model) -> None:
    async def old(stream: ByteStream, request: dict[str, Any]) -> None:
        await model.honest()(stream, {**request, "ask": "old"} if request["ask"] == "ranges" else request)

    async with peer("old", old) as older:
        with pytest.raises(DownloadFailed, match="it does not understand the request"):
            await model.fetch(MIDDLE, older)
    async with peer("old", old) as older, peer("bert", model.honest()) as bert:
        model.check(await model.fetch(MIDDLE, older, bert), MIDDLE)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"bytes": 5}\n12345', "it answered another question"),
        (b'{"bytes": true}\n', "it answered another question"),
        (b"x" * 10_000, "it sent a line that is too long"),
        (b"[]\n", "it sent something unreadable"),
        (b'{"refused": "\\u001b[2J"}\n', "?[2J"),
        (b"", "it stopped early, in the middle of its answer"),
    ],
)
@pytest.mark.parametrize("ask", ["bytes", "ranges"])
async def test_answers_that_no_honest_source_gives(
    model: Model, ask: str, answer: bytes, reason: str
) -> None:
    async def hostile(stream: ByteStream, request: dict[str, Any]) -> None:
        if request["ask"] == ask:
            await stream.write(answer)
            await stream.finish()
        else:
            await model.honest()(stream, request)

    async with peer("mallory", hostile) as mallory, peer("bert", model.honest()) as bert:
        held = await model.fetch(MIDDLE, mallory, bert)
    model.check(held, MIDDLE)
    assert model.said()[0] == f"tiny from mallory: {reason}"


async def test_a_header_without_an_end_is_given_up(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_fetch, "_HEADER_BYTES", 4 * PIECE_BYTES)
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + os.urandom(1 << 20))
    async with peer("mallory", honest(model.cache, model.fingerprint, (junk,))) as mallory:
        with pytest.raises(DownloadFailed, match="what arrived is not the model"):
            await model.fetch(MIDDLE, mallory)
        assert mallory.bytes_asked == 4 * PIECE_BYTES
    assert list(model.own.iterdir()) == []


async def forge(model: Model, folder: Path) -> Path:
    """Right where the fingerprint looks, wrong elsewhere: such a one can be told by its hashes alone."""
    forged = folder / "forged.gguf"
    where = model.table.tensors["blk.8.ffn_up.weight"]
    assert where.size_bytes > 8192
    content = bytearray(model.content[0])
    content[where.offset + 5000] ^= 1
    forged.write_bytes(content)
    assert (await read_gguf(forged))["fingerprint"] == model.fingerprint
    return forged


async def test_no_byte_is_fetched_of_a_copy_that_the_owner_did_not_choose(
    model: Model, tmp_path: Path
) -> None:
    forged, digest = await forge(model, tmp_path), manifest_digest(model.content)
    async with peer("mallory", honest(model.cache, model.fingerprint, (forged,))) as mallory:
        with pytest.raises(DownloadFailed, match="its copy is not the one that the mesh's owner chose"):
            await model.fetch(MIDDLE, mallory, digest=digest)
        assert {request["ask"] for request in mallory.requests} == {"manifest"}
        async with peer("anna", model.honest()) as anna:
            held = await model.fetch(MIDDLE, mallory, anna, digest=digest)
    model.check(held, MIDDLE)


async def test_layers_that_came_before_the_digest_was_known_give_way(model: Model, tmp_path: Path) -> None:
    forged, digest = await forge(model, tmp_path), manifest_digest(model.content)
    async with peer("mallory", honest(model.cache, model.fingerprint, (forged,))) as mallory:
        await model.fetch(MIDDLE, mallory)
    assert await layer_fetch.find(model.folder, model.fingerprint, read=model.read) is not None
    assert await layer_fetch.find(model.folder, model.fingerprint, digest=digest, read=model.read) is None

    async with peer("anna", model.honest()) as anna:
        held = await model.fetch(MIDDLE, anna, digest=digest)
    model.check(held, MIDDLE)
    assert await layer_fetch.find(model.folder, model.fingerprint, digest=digest, read=model.read) == held


async def test_another_version_is_refused_and_gives_way_when_nobody_has_it(
    model: Model, tmp_path: Path
) -> None:
    forged = await forge(model, tmp_path)
    async with peer("mallory", honest(model.cache, model.fingerprint, (forged,))) as mallory:
        await model.fetch(MIDDLE, mallory)
        async with peer("bert", model.honest()) as bert:
            # While it is here, both are there to choose from: pieces of the two are never mixed.
            held = await model.fetch(LAST, bert, mallory)
            assert (
                "tiny from bert: its copy is not the one that the layers on this disk are from"
                in model.said()
            )
            assert bert.bytes_asked == 0
            assert held.has(MIDDLE)
    async with peer("bert", model.honest()) as bert:
        with pytest.raises(DownloadFailed, match="its copy is not the one"):
            await model.fetch(Share(first=8, last=10, head=False), bert)
        again = await model.fetch(Share(first=8, last=10, head=False), bert)
    model.check(again, Share(first=8, last=10, head=False))


# -- the disk -------------------------------------------------------------------------------------


async def test_a_file_system_without_holes_is_said(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: Path, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "truncate", no_room)
    async with peer("anna", model.honest()) as anna:
        with pytest.raises(NoHoles, match="does not support sparse files: File too large"):
            await model.fetch(MIDDLE, anna)
        assert anna.bytes_asked == 0


async def test_a_full_disk_is_said_before_a_byte_is_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer("anna", model.honest()) as anna:
        await model.fetch(None, anna)
        anna.requests.clear()
        facts = list(os.statvfs("/"))
        facts[1], facts[4] = 4096, 65_600  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(facts))
        with pytest.raises(DownloadFailed, match="are still to come") as caught:
            await model.fetch(MIDDLE, anna)
        assert anna.bytes_asked == 0
    assert caught.value.hint == "free some space, or name another folder in MESH_LLM_MODELS"


# -- over QUIC ------------------------------------------------------------------------------------


async def test_layers_between_members_of_a_mesh(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_of_members() as mesh:
        first, second = await mesh.pair()
        asked: list[dict[str, Any]] = []
        cuts = [PIECE_BYTES * 3 + 7]

        async def serve(connection: Connection, kind: str, header: dict[str, Any], stream: Stream) -> None:
            assert kind == "echo"
            asked.append(header)
            answer = model.honest()
            if header["ask"] == "bytes" and header["length"] > 3 * PIECE_BYTES and cuts:
                answer = meddling(answer, limit=cuts.pop())
            await answer(stream, header)

        monkeypatch.setattr(first.handler, "on_stream", serve)

        @asynccontextmanager
        async def open(request: dict[str, Any]) -> AsyncIterator[ByteStream]:
            stream = await second.peer(first).open("echo", request)
            try:
                yield stream
            finally:
                stream.reset()

        held = await model.fetch(MIDDLE, Source(name="first", open=open))
    model.check(held, MIDDLE)
    assert cuts == []
    assert len([each for each in asked if each["ask"] == "bytes" and each["length"] > 3 * PIECE_BYTES]) >= 1
