"""A socket on each side, spliced to one QUIC stream: by the event loop, and by the native library."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from mesh_llm.engine import build
from mesh_llm.transport import native_splice
from mesh_llm.transport.native_splice import NativeSplicer, load_native
from mesh_llm.transport.splice import LoopSplicer, SpliceEnd, Splicer, SpliceReport, splice
from tests.support.quic import Joined, joined_endpoints
from tests.support.waiting import POLL_S

WAIT_S = 30.0
"""For what takes milliseconds, on a machine that is busy with something else."""
STILL_POLLS = 15
HELD_LIMIT_BYTES = 32 << 20
"""More than iroh's windows and all sockets on the way hold together, by half."""

T = TypeVar("T")


@pytest.fixture(scope="session")
def splice_library() -> Path:
    built = asyncio.run(build.ensure((build.SPLICE,), lambda _: None, retry=True))
    if error := built.missing.get(build.SPLICE):
        pytest.skip(f"libmesh-splice cannot be built: {error.message}")
    return built.libraries[build.SPLICE]


@pytest.fixture(params=["loop", "native"])
def splicer(request: pytest.FixtureRequest) -> Splicer:
    if request.param == "loop":
        return LoopSplicer()
    native = load_native(request.getfixturevalue("splice_library"))
    assert native is not None
    return native


@pytest.fixture
async def quic() -> AsyncIterator[Joined]:
    async with joined_endpoints() as joined:
        yield joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Spliced:
    """What children would hold (`near`, `far`), and the splices in between."""

    near: socket.socket
    far: socket.socket
    near_splice: asyncio.Task[SpliceReport]
    far_splice: asyncio.Task[SpliceReport]

    async def reports(self) -> tuple[SpliceReport, SpliceReport]:
        return await soon(self.near_splice), await soon(self.far_splice)


@asynccontextmanager
async def spliced(quic: Joined, splicer: Splicer) -> AsyncIterator[Spliced]:
    near_stream, far_stream = await quic.stream()
    near, near_link = socket.socketpair()
    far, far_link = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    tasks = [
        asyncio.create_task(splice(link, stream.send(), stream.recv(), splicer=splicer), name="splice")
        for link, stream in ((near_link, near_stream), (far_link, far_stream))
    ]
    try:
        yield Spliced(near=near, far=far, near_splice=tasks[0], far_splice=tasks[1])
    finally:
        near.close()
        far.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=WAIT_S)
        # A task that was cancelled before its first step has closed nothing.
        near_link.close()
        far_link.close()


async def soon(work: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await work


async def send(end: socket.socket, data: bytes, *, close: bool = True) -> None:
    await soon(asyncio.get_running_loop().sock_sendall(end, data))
    if close:
        end.shutdown(socket.SHUT_WR)


async def receive(end: socket.socket, size: int | None = None) -> bytes:
    """So many bytes, or all until the end."""
    loop, received = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(WAIT_S):
        while size is None or len(received) < size:
            data = await loop.sock_recv(end, 1 << 20 if size is None else size - len(received))
            if not data:
                break
            received += data
    return bytes(received)


async def ends(end: socket.socket) -> bool:
    """Whether nothing more arrives, in whichever way the system says so."""
    try:
        return await receive(end) == b""
    except ConnectionResetError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(POLL_S)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, 64 << 10, 10 << 20])
async def test_bytes_arrive_as_they_were_in_both_directions_at_once(
    quic: Joined, splicer: Splicer, size: int
) -> None:
    there, back = noise(size, 1), noise(size, 2)
    async with spliced(quic, splicer) as ways:
        _, _, at_far, at_near = await asyncio.gather(
            send(ways.near, there), send(ways.far, back), receive(ways.far), receive(ways.near)
        )
        assert at_far == there
        assert at_near == back
        whole = SpliceReport(sent_bytes=size, received_bytes=size, end=SpliceEnd.FINISHED)
        assert await ways.reports() == (whole, whole)


async def test_messages_go_back_and_forth(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        for number in range(50):
            message = noise(1 + 977 * number % 5000, number)
            await send(ways.near, message, close=False)
            assert await receive(ways.far, len(message)) == message
            await send(ways.far, message[::-1], close=False)
            assert await receive(ways.near, len(message)) == message[::-1]


async def test_the_end_of_one_direction_leaves_the_other_open(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        await send(ways.near, b"all that I have")
        assert await receive(ways.far) == b"all that I have"
        for number in range(3):
            await send(ways.far, b"answer %d" % number, close=False)
            assert await receive(ways.near, 8) == b"answer %d" % number
        assert not ways.near_splice.done()
        assert not ways.far_splice.done()
        ways.far.shutdown(socket.SHUT_WR)
        assert await receive(ways.near) == b""
        near, far = await ways.reports()
        assert (near.end, near.sent_bytes, near.received_bytes) == (SpliceEnd.FINISHED, 15, 24)
        assert (far.end, far.sent_bytes, far.received_bytes) == (SpliceEnd.FINISHED, 24, 15)


async def test_a_child_that_dies_ends_the_link_for_the_other(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        await send(ways.near, b"last words", close=False)
        ways.near.close()
        assert await receive(ways.far) == b"last words"
        ways.far.close()
        near, far = await ways.reports()
        assert near.end is SpliceEnd.FINISHED
        assert far.end is SpliceEnd.FINISHED


async def test_a_child_that_dies_while_bytes_are_on_their_way_to_it(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        feeding = asyncio.create_task(send(ways.far, noise(64 << 20), close=False), name="feeding")
        await receive(ways.near, 1 << 20)
        ways.near.close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await feeding
        near, far = await ways.reports()
        assert near.end is SpliceEnd.LINK_LOST
        assert near.reason in ("Broken pipe", "Connection reset by peer")
        assert far.end is SpliceEnd.STREAM_LOST
        assert far.reason != ""


async def test_a_stream_that_the_peer_resets_is_no_clean_end(quic: Joined, splicer: Splicer) -> None:
    near_stream, far_stream = await quic.stream()
    near, link = socket.socketpair()
    near.setblocking(False)
    with near:
        task = asyncio.create_task(
            splice(link, near_stream.send(), near_stream.recv(), splicer=splicer), name="splice"
        )
        await soon(far_stream.send().write_all(b"half an ans"))
        assert await receive(near, 11) == b"half an ans"
        await soon(far_stream.send().reset(7))
        report = await soon(task)
        assert report.end is SpliceEnd.STREAM_LOST
        assert report.received_bytes == 11
        assert await ends(near)
        assert await soon(far_stream.recv().received_reset()) == 1


async def test_a_peer_that_stops_reading_for_good_stops_the_writer(quic: Joined, splicer: Splicer) -> None:
    near_stream, far_stream = await quic.stream()
    near, link = socket.socketpair()
    near.setblocking(False)
    with near:
        task = asyncio.create_task(
            splice(link, near_stream.send(), near_stream.recv(), splicer=splicer), name="splice"
        )
        await soon(far_stream.recv().stop(7))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await send(near, noise(64 << 20))
        assert (await soon(task)).end is SpliceEnd.STREAM_LOST


async def test_a_connection_that_goes_ends_the_splice(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        await send(ways.near, b"hello", close=False)
        assert await receive(ways.far, 5) == b"hello"
        quic.far.close(3, b"gone")
        near, far = await ways.reports()
        assert near.end is SpliceEnd.STREAM_LOST
        assert far.end is SpliceEnd.STREAM_LOST
        assert await ends(ways.near)
        assert await ends(ways.far)


async def test_a_reader_that_sleeps_stops_the_writer(quic: Joined, splicer: Splicer) -> None:
    data, sent = noise(1 << 20), 0
    total = 4 * HELD_LIMIT_BYTES

    async def write() -> None:
        nonlocal sent
        while sent < total:
            await asyncio.get_running_loop().sock_sendall(ways.near, data)
            sent += len(data)

    async with spliced(quic, splicer) as ways:
        writing = asyncio.create_task(write(), name="writer")
        await until(lambda: sent > 0)
        still, before = 0, sent
        async with asyncio.timeout(WAIT_S):
            while still < STILL_POLLS:
                await asyncio.sleep(POLL_S)
                still = still + 1 if sent == before else 0
                before = sent
        assert not writing.done()
        assert sent <= HELD_LIMIT_BYTES
        held = sent
        for _ in range(total >> 20):
            assert await receive(ways.far, 1 << 20) == data
        await soon(writing)
        assert sent == total > held


async def test_cancelling_closes_the_link_and_tells_the_peer(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        await send(ways.near, b"hello", close=False)
        assert await receive(ways.far, 5) == b"hello"
        ways.near_splice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(ways.near_splice)
        assert await ends(ways.near)
        assert (await soon(ways.far_splice)).end is SpliceEnd.STREAM_LOST
        assert await ends(ways.far)


async def test_cancelling_while_both_directions_are_blocked(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        writers = [
            asyncio.create_task(send(end, noise(64 << 20)), name="writer") for end in (ways.near, ways.far)
        ]
        await receive(ways.far, 1 << 20)
        await receive(ways.near, 1 << 20)
        ways.near_splice.cancel()
        ways.near_splice.cancel()
        for ended in (ways.near_splice, *writers):
            with pytest.raises((asyncio.CancelledError, BrokenPipeError, ConnectionResetError)):
                await soon(ended)
        # What the far link still holds has to go before its end is seen.
        with suppress(ConnectionResetError):
            await receive(ways.far)
        assert (await soon(ways.far_splice)).end in (SpliceEnd.STREAM_LOST, SpliceEnd.LINK_LOST)


async def test_cancelling_as_soon_as_it_has_started(quic: Joined, splicer: Splicer) -> None:
    async with spliced(quic, splicer) as ways:
        await asyncio.sleep(0)
        ways.near_splice.cancel()
        ways.far_splice.cancel()
        for task in (ways.near_splice, ways.far_splice):
            with pytest.raises(asyncio.CancelledError):
                await soon(task)


async def test_many_at_once_do_not_mix(quic: Joined, splicer: Splicer) -> None:
    async def exchange(number: int) -> None:
        there, back = noise(300_000 + number, number), noise(200_000 + number, 1000 + number)
        async with spliced(quic, splicer) as ways:
            _, _, at_far, at_near = await asyncio.gather(
                send(ways.near, there), send(ways.far, back), receive(ways.far), receive(ways.near)
            )
            assert at_far == there
            assert at_near == back
            near, far = await ways.reports()
            assert near.end is far.end is SpliceEnd.FINISHED

    await asyncio.gather(*(exchange(number) for number in range(24)))


async def test_nothing_is_left_open(quic: Joined, splicer: Splicer) -> None:
    process = psutil.Process()
    async with spliced(quic, splicer):
        pass
    before = process.num_fds()
    for _ in range(5):
        async with spliced(quic, splicer) as ways:
            await send(ways.near, b"hello", close=False)
            assert await receive(ways.far, 5) == b"hello"
    # The native library and iroh close theirs in threads of their own.
    await until(lambda: process.num_fds() <= before)


# -- which one is used ------------------------------------------------------------------------------


def test_without_a_library_there_is_no_native_splicer(tmp_path: Path) -> None:
    assert load_native(None) is None
    assert load_native(tmp_path / "missing.so") is None


def test_an_iroh_that_it_was_not_made_for_is_not_called(
    splice_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(load_native(splice_library), NativeSplicer)
    monkeypatch.setitem(native_splice._CHECKSUMS, "method_recvstream_read", 1)
    assert load_native(splice_library) is None
