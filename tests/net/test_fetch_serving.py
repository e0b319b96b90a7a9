"""The node that sends model files: what it refuses, how fast it is, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.peer_fetch import piece_hashes as digests_module
from mesh_llm.peer_fetch.channel import ByteStream
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.throttle import Throttle
from mesh_llm.types import Fingerprint, NodeId, Progress
from tests.support.fetching import Model
from tests.support.file_peer import PIECE_BYTES, SocketStream, connect, honest, peer

# -- the source's side ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"ask": "manifest", "fingerprint": "other"}, "it does not have the model"),
        ({"ask": "manifest", "fingerprint": 5}, "it does not have the model"),
        ({"ask": "manifest"}, "it does not have the model"),
        ({"ask": "everything"}, "it does not understand the request"),
        ({}, "it does not understand the request"),
        ({"ask": "bytes", "file": 1}, "it has no such part of the model"),
        ({"ask": "bytes", "file": -1}, "it has no such part of the model"),
        ({"ask": "bytes", "file": "0"}, "it has no such part of the model"),
        ({"ask": "bytes", "offset": -1}, "it has no such part of the model"),
        ({"ask": "bytes", "offset": 1 << 70}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 0}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 1 << 40}, "it has no such part of the model"),
        ({"ask": "bytes", "length": 1.5}, "it has no such part of the model"),
        ({"ask": "bytes", "size": 10, "length": 5}, "its file has another size"),
        ({"ask": "ranges"}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": []}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": {"0": 1}}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [[0, 1]] * 1025}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [[0, 10], [5, 1 << 40]]}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [[0, 10], [-1, 2]]}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [[0, 10, 3]]}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [[0, 0]]}, "it has no such part of the model"),
        ({"ask": "ranges", "ranges": [["0", 1]]}, "it has no such part of the model"),
        ({"ask": "ranges", "size": 10, "ranges": [[0, 5]]}, "its file has another size"),
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


@pytest.mark.parametrize("joiners", [["anna"] * 4, [*["anna"] * 4, *["bert"] * 3, "carl"]])
async def test_a_source_sends_so_many_files_at_once_and_no_more(model: Model, joiners: list[str]) -> None:
    held = {"ask": "bytes", "file": 0, "size": model.size_bytes, "offset": 0, "length": model.size_bytes}
    request = {**held, "fingerprint": model.fingerprint}
    # So slow that the first chunks are the last ones for the length of this test.
    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=1000)
    origins = iter([NodeId(name) for name in [*joiners, joiners[-1]]])
    answer = model.honest(throttle=throttle, origin=lambda: next(origins))
    async with peer("source", answer) as source, AsyncExitStack() as stack:
        for _ in joiners:
            stream = await stack.enter_async_context(connect("source", source.port).open(request))
            assert (await stream.read(14)).startswith(b'{"bytes": ')
        last = await stack.enter_async_context(connect("source", source.port).open(request))
        assert json.loads(await last.read(1000)) == {"refused": "it sends as many files as it can at once"}


async def test_one_peer_cannot_keep_the_others_out(model: Model) -> None:
    """Those of its streams that are refused take no place either, though it does not read why."""
    refused = asyncio.Event()

    class Unread(SocketStream):
        async def finish(self) -> None:
            refused.set()
            await asyncio.Event().wait()

    throttle = Throttle(busy=lambda: True, busy_bytes_per_s=1000)
    origin = NodeId("mallory")
    inner = model.honest(throttle=throttle, origin=lambda: origin)

    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        assert isinstance(stream, SocketStream)
        await inner(Unread(stream.reader, stream.writer) if origin == "mallory" else stream, request)

    held = {"ask": "bytes", "file": 0, "size": model.size_bytes, "offset": 0, "length": model.size_bytes}
    request = {**held, "fingerprint": model.fingerprint}
    async with peer("source", answer) as source, AsyncExitStack() as stack:
        for _ in range(20):
            stream = await stack.enter_async_context(connect("source", source.port).open(request))
            await stream.read(14)
        assert refused.is_set()
        origin = NodeId("bert")
        stream = await stack.enter_async_context(connect("source", source.port).open(request))
        assert (await stream.read(14)).startswith(b'{"bytes": ')


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
        digests = PieceHashes(tmp_path / "cache", piece_bytes=PIECE_BYTES)
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
    digests = PieceHashes(tmp_path / "cache", piece_bytes=PIECE_BYTES)
    held_at: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    heard = asyncio.Event()

    async def first(done: int) -> None:
        if not held_at.done():
            held_at.set_result(done)
        async with asyncio.timeout(30):
            await heard.wait()

    async def second(done: int) -> None:
        if held_at.done() and held_at.result() == done:
            heard.set()

    async with asyncio.timeout(60):
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
        got = b""
        while more := await fifth.read(100):
            got += more
        assert got == b'{"bytes": 1}\n\0'


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
