"""Model files from peers: one source and several, cut connections, killed receivers, hostile sources."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models import incoming_folders
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.types import Fingerprint, Progress
from tests.support import tiny_gguf
from tests.support.fetching import Model, digest_of
from tests.support.file_peer import PIECE_BYTES, honest, meddling, only_once, peer

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
    digests = PieceHashes(tmp_path / "own cache", piece_bytes=PIECE_BYTES)
    async with peer("anna", model.honest()) as anna:
        (path,) = await model.fetch(anna, digests=digests)
    known = digests.known(path)
    assert known is not None
    assert known == PieceHashes(model.cache, piece_bytes=PIECE_BYTES).known(model.files[0])


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
    assert model.said() == ["tiny is being fetched by another node on this machine"]


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
    assert model.said() == ["tiny from anna: it stopped early"]


async def test_one_peer_that_is_cut_again_and_again(sharded: Model) -> None:
    async with peer("anna", meddling(sharded.honest(), limit=70_000)) as anna:
        paths = await sharded.fetch(anna)
        assert anna.bytes_asked > sharded.size_bytes
    assert [path.read_bytes() for path in paths] == sharded.content


@pytest.mark.parametrize("cut", [1000, PIECE_BYTES, 300_000])
async def test_a_later_run_goes_on_where_one_failed(model: Model, cut: int) -> None:
    async with peer("anna", only_once(meddling(model.honest(), limit=cut))) as anna:
        with pytest.raises(DownloadFailed) as caught:
            await model.fetch(anna)
    assert caught.value.message.startswith("tiny could not be fetched: anna: it stopped early")
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
        async with asyncio.timeout(30):
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
from mesh_llm.peer_fetch.model_fetch import Wanted, fetch
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
    async with peer("anna", only_once(meddling(model.honest(), limit=cut))) as anna:
        with pytest.raises(DownloadFailed):
            await model.fetch(anna)
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
        "tiny from anna: it stopped early",
        "tiny from bert: a piece that another source began was damaged and is fetched again",
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
        f"but {model.folder} has room for 0.3 MB"
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
    with incoming_folders.scratch(tmp_path) as held:
        (held / "wheel").write_bytes(b"x")
        incoming_folders.clean(tmp_path, now=now)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [held.name, ".incoming-fetch-new", ".incoming-file", "incoming-mine"]
        )
        assert (held / "wheel").exists()
    assert not held.exists()


async def test_a_fetch_under_way_is_not_removed_however_old(tmp_path: Path) -> None:
    async with incoming_folders.resumable(tmp_path, "a", waiting=lambda: None) as held:
        incoming_folders.clean(tmp_path, now=held.stat().st_mtime + 1e9)
        assert held.exists()
    incoming_folders.clean(tmp_path, now=held.stat().st_mtime + 1e9)
    assert not held.exists()


async def test_the_scratch_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\nfrom mesh_llm.models import incoming_folders as incoming\n"
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
        incoming_folders.clean(tmp_path, now=0.0)
        assert left.is_dir()
        child.kill()
        await child.wait()
    incoming_folders.clean(tmp_path, now=0.0)
    assert list(tmp_path.iterdir()) == []
