"""Model files from peers that lie, stall, or name what is not theirs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.errors import DownloadFailed
from mesh_llm.peer_fetch.channel import ByteStream
from mesh_llm.peer_fetch.model_fetch import FetchTimes, Source, Wanted, fetch
from mesh_llm.types import Fingerprint
from tests.support.fetching import QUICK, Model, digest_of
from tests.support.file_peer import PIECE_BYTES, Answer, honest, meddling, only_once, peer

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
        lines(manifest(piece_bytes=4096, files=[{"size": 4096 * 131_073, "pieces": HASH * 131_073}] * 2)),
        "an impossible size",
    ),
    "files that are none": (lines(manifest(files=["x"])), "an impossible size"),
    "pieces of nothing": (lines(manifest(piece_bytes=0)), "pieces of an impossible size"),
    "no name": (lines(manifest(name=None)), "no usable name"),
    "an endless name": (lines(manifest(name="x" * 2000)), "no usable name"),
    "no JSON": (b"GGUF\n", "something unreadable"),
    "deep JSON": (b"[" * 100_000 + b"\n", "something unreadable"),
    "no object": (lines([1]), "something unreadable"),
    "an endless line": (b"x" * (21 << 20), "a line that is too long"),
    "hashing without an end": (lines({"hashing": 0}) * 3000, "it did not finish its hashing"),
    "hashing backwards": (lines({"hashing": -1}), "something unreadable"),
    "nothing": (b"", "it stopped early"),
    "half": (lines(manifest())[:-10], "it stopped early"),
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


async def test_no_byte_is_fetched_of_a_copy_that_the_owner_did_not_choose(model: Model) -> None:
    """Whatever it says of its fingerprint, which a forger can keep."""

    async def any_will_do(paths: tuple[Path, ...]) -> Fingerprint:
        return model.fingerprint

    forged = model.cache.with_name("forged.gguf")
    forged.write_bytes(model.content[0][:-1] + b"?")
    async with peer("mallory", honest(model.cache, model.fingerprint, (forged,))) as mallory:
        with pytest.raises(DownloadFailed, match="its copy is not the one that the mesh's owner chose"):
            await model.fetch(mallory, digest=model.digest, verify=any_will_do)
        assert {request["ask"] for request in mallory.requests} == {"manifest"}
        async with peer("anna", model.honest()) as anna:
            (path,) = await model.fetch(mallory, anna, digest=model.digest, verify=any_will_do)
    assert path.read_bytes() == model.content[0]


def versions(model: Model) -> set[str]:
    return {path.name for path in model.folder.glob(".incoming-fetch-*/*")}


def inventing() -> Answer:
    """Whoever asks is offered another copy each time, and given a little more of it than of the last one."""
    number = 0

    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        nonlocal number
        if request["ask"] == "manifest":
            number += 1
            data = lines(files(PIECE_BYTES, f"{number:064x}"))
        else:
            data = lines({"bytes": request["length"]}) + bytes(100 * number)
        await sending(data)(stream, request)

    return answer


async def test_copies_that_are_invented_do_not_pile_up(model: Model) -> None:
    async with peer("anna", only_once(meddling(model.honest(), limit=100_000))) as anna:
        with pytest.raises(DownloadFailed):
            await model.fetch(anna)
    (begun,) = versions(model)
    async with peer("mallory", inventing()) as mallory, peer("bert", model.honest()) as bert:
        for _ in range(2):
            with pytest.raises(DownloadFailed):
                await model.fetch(mallory)
            assert len(mallory.offsets) > 3
            assert len(versions(model)) == 2
            # Who has sent most is kept.
            assert begun in versions(model)
        (path,) = await model.fetch(mallory, bert)
        assert bert.offsets[0][1] >= 100_000
    assert path.read_bytes() == model.content[0]
    assert versions(model) == set()


async def test_copies_that_the_owner_did_not_choose_are_removed(model: Model) -> None:
    async with peer("mallory", inventing()) as mallory:
        with pytest.raises(DownloadFailed):
            await model.fetch(mallory)
        async with peer("anna", only_once(meddling(model.honest(), limit=100_000))) as anna:
            with pytest.raises(DownloadFailed):
                await model.fetch(anna)
    assert len(versions(model)) == 2

    with pytest.raises(DownloadFailed):
        await model.fetch(digest=model.digest)

    assert versions(model) == {model.digest[:32]}


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
        (lines({"bytes": 4}) + b"fals", "it answered another question"),
        (lines({"bytes": -1}), "it answered another question"),
        (lines({"bytes": "5"}) + b"false", "it answered another question"),
        (lines({}) + b"false", "it answered another question"),
        (b"\xff\xfe\n", "something unreadable"),
        (b"y" * 100_000, "a line that is too long"),
        (lines({"bytes": 5}) + b"fals", "it stopped early"),
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
    assert paths[0].read_bytes() == model.content[0]
    assert model.said()[0] == "tiny from mallory: it sends nothing, or hardly anything"


async def test_a_source_that_drips_bytes_is_left_and_its_bytes_are_kept(model: Model) -> None:
    async def drip(stream: ByteStream, request: dict[str, Any]) -> None:
        if request["ask"] == "manifest":
            await model.honest()(stream, request)
            return
        await stream.write(lines({"bytes": request["length"]}))
        for byte in model.content[0]:
            await stream.write(bytes([byte]))
            await asyncio.sleep(0.02)

    async with peer("mallory", drip) as mallory, peer("bert", model.honest()) as bert:
        paths = await model.fetch(mallory, bert, times=FetchTimes(stall_s=1.5, pause_s=0.0))
        assert 0 < bert.offsets[0][1] < 1000
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
