"""Lines with an address, over TCP, unix sockets and UDP: what passes, how late, and how they change."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from mesh_llm.errors import PortInUse, UsageError
from mesh_llm.lab.addresses import LineAddress, bound, listening
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.delay import OPEN, DelayDoor, Lines, delay_lines
from tests.support.waiting import until

WAIT_S = 20.0
SLACK_S = 3.0
"""For a line or the other side to be scheduled, on a machine that is busy with something else."""
KINDS = pytest.mark.parametrize("kind", ["tcp", "unix", "udp"])
STREAMS = pytest.mark.parametrize("kind", ["tcp", "unix"])


def address(kind: str, folder: Path, name: str) -> LineAddress:
    return LineAddress.parse(f"unix:{folder / name}" if kind == "unix" else f"{kind}:127.0.0.1:0")


def connected(where: LineAddress) -> socket.socket:
    family = socket.AF_UNIX if where.kind == "unix" else socket.AF_INET
    end = socket.socket(family, socket.SOCK_DGRAM if where.kind == "udp" else socket.SOCK_STREAM)
    end.settimeout(WAIT_S)
    end.connect(where.at)
    return end


@contextmanager
def echo(kind: str, folder: Path) -> Iterator[LineAddress]:
    """Sends back what comes; a stream's end, too."""
    over = threading.Event()

    def back(end: socket.socket) -> None:
        with end:
            while data := end.recv(1 << 16):
                end.sendall(data)

    def serve() -> None:
        while not over.is_set():
            try:
                if kind == "udp":
                    data, sender = listener.recvfrom(1 << 16)
                    listener.sendto(data, sender)
                else:
                    end, _ = listener.accept()
                    end.settimeout(WAIT_S)
                    threading.Thread(target=back, args=(end,), daemon=True).start()
            except TimeoutError:
                continue

    with listening(address(kind, folder, "target")) as listener:
        listener.settimeout(0.1)
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield bound(listener, kind)
        finally:
            over.set()
            serving.join()


@asynccontextmanager
async def line_to(
    target: LineAddress, folder: Path, *, there: Conditions = OPEN, back: Conditions = OPEN
) -> AsyncIterator[tuple[LineAddress, Lines]]:
    listener = listening(address(target.kind, folder, "line"))
    here = bound(listener, target.kind)
    door = DelayDoor(listener=listener, target=target.at, there=there, back=back)
    async with delay_lines((), [door], seed=1) as lines:
        await lines.read()  # its child runs now
        yield here, lines


def round_trip_s(end: socket.socket) -> float:
    began = time.perf_counter()
    end.send(b"token")
    assert end.recv(64) == b"token"
    return time.perf_counter() - began


@KINDS
async def test_each_way_has_its_own_delay_and_both_change_while_it_runs(kind: str, tmp_path: Path) -> None:
    with echo(kind, tmp_path) as target:
        there, back = Conditions(delay_s=0.2), Conditions(delay_s=0.05)
        async with line_to(target, tmp_path, there=there, back=back) as (here, lines):
            with connected(here) as end:
                assert 0.25 <= await asyncio.to_thread(round_trip_s, end) < 0.25 + SLACK_S
                passed = await lines.read()
                assert passed[0].median_ms >= 200
                assert 50 <= passed[1].median_ms < 1000 * (0.05 + SLACK_S)
                await lines.set(0, there=OPEN, back=Conditions(delay_s=0.4))
                assert 0.4 <= await asyncio.to_thread(round_trip_s, end) < 0.4 + SLACK_S
                await lines.set(0, there=OPEN, back=OPEN)
                assert min([await asyncio.to_thread(round_trip_s, end) for _ in range(10)]) < 0.2
    assert [passage.size_bytes for passage in lines.passages] == [60, 60]


@STREAMS
async def test_a_stream_is_whole_while_its_conditions_change(kind: str, tmp_path: Path) -> None:
    """No delay, some, little bandwidth, loss, and back: every byte arrives, in order."""
    data = random.Random(3).randbytes(24 << 20)
    narrow = Conditions(delay_s=0.002, jitter_s=0.001, bytes_s=60e6, loss=0.001)
    with echo(kind, tmp_path) as target:
        async with line_to(target, tmp_path) as (here, lines):
            with connected(here) as end:

                def receive() -> str:
                    found, left = hashlib.sha256(), len(data)
                    while left and (piece := end.recv(min(left, 1 << 18))):
                        found.update(piece)
                        left -= len(piece)
                    return found.hexdigest()

                sending = asyncio.create_task(asyncio.to_thread(end.sendall, data))
                receiving = asyncio.create_task(asyncio.to_thread(receive))
                for conditions in (Conditions(delay_s=0.01), OPEN, narrow, OPEN):
                    await asyncio.sleep(0.1)
                    await lines.set(0, there=conditions, back=conditions)
                await sending
                assert await receiving == hashlib.sha256(data).hexdigest()


@STREAMS
async def test_one_side_may_end_before_the_other(kind: str, tmp_path: Path) -> None:
    """What is still on its way back arrives after this side has said that it has no more to say."""
    far = Conditions(delay_s=0.05)
    with echo(kind, tmp_path) as target:
        async with line_to(target, tmp_path, there=far, back=far) as (here, _):
            with connected(here) as end:
                end.sendall(b"last words")
                end.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(end.recv, 100) == b"last words"
                assert await asyncio.to_thread(end.recv, 100) == b""


async def test_connections_that_ended_leave_nothing(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with echo("tcp", tmp_path) as target:
        async with line_to(target, tmp_path) as (here, _):
            [child] = [each for each in psutil.Process().children() if each.pid not in before]
            held = child.num_fds(), child.num_threads()
            for _ in range(10):
                with connected(here) as end:
                    await asyncio.to_thread(round_trip_s, end)
            await asyncio.to_thread(
                until,
                lambda: (child.num_fds(), child.num_threads()) == held,
                within_s=WAIT_S,
                what="sockets and threads are gone",
            )


async def test_bandwidth_holds_a_stream_back(tmp_path: Path) -> None:
    with echo("tcp", tmp_path) as target:
        async with line_to(target, tmp_path, there=Conditions(bytes_s=1e6)) as (here, _):
            with connected(here) as end:
                began = time.perf_counter()
                await asyncio.to_thread(end.sendall, bytes(400_000))
                received = 0
                while received < 400_000:
                    received += len(await asyncio.to_thread(end.recv, 1 << 18))
                assert 0.4 <= time.perf_counter() - began < 0.4 + SLACK_S


async def test_datagrams_of_many_sizes_and_senders(tmp_path: Path) -> None:
    """Runs of one size, single ones, empty and large ones; everybody gets their own back."""
    noise = random.Random(5)
    with echo("udp", tmp_path) as target:
        async with line_to(target, tmp_path, there=Conditions(delay_s=0.01)) as (here, lines):
            ends = [connected(here) for _ in range(3)]
            for end in ends:
                sent = []
                for size in (1200,) * 20 + (0, 5, 9000, 60_000) + (300,) * 10 + (1, 1):
                    sent.append(noise.randbytes(size))
                    end.send(sent[-1])
                found = [await asyncio.to_thread(end.recv, 1 << 16) for _ in sent]
                assert found == sent
                end.close()
    assert lines.passages[0].lost == 0
    assert lines.passages[0].size_bytes == lines.passages[1].size_bytes


async def test_lost_datagrams_are_gone(tmp_path: Path) -> None:
    with echo("udp", tmp_path) as target:
        async with line_to(target, tmp_path, there=Conditions(loss=0.3)) as (here, lines):
            with connected(here) as end:
                for number in range(200):
                    end.send(number.to_bytes(2))
                    await asyncio.sleep(0)
                end.settimeout(2.0)
                found = []
                try:
                    while True:
                        found.append(int.from_bytes(await asyncio.to_thread(end.recv, 16)))
                except TimeoutError:
                    pass
    assert 100 < len(found) < 180
    assert found == sorted(found)
    assert len(found) + lines.passages[0].lost == 200


@pytest.mark.parametrize("text", ["", "5000", "host:", "tcp:host:port", "udp:1.2.3.4:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        LineAddress.parse(text)


def test_a_line_listens_on_this_machine_alone(tmp_path: Path) -> None:
    for text in ("0.0.0.0:0", "udp:192.0.2.1:0"):
        with pytest.raises(UsageError, match="on this machine alone"):
            listening(LineAddress.parse(text))
    with listening(LineAddress.parse("127.0.0.1:0")) as taken, pytest.raises(PortInUse):
        listening(bound(taken, "tcp"))
    path = LineAddress.parse(str(tmp_path / "here"))
    listening(path).close()
    with listening(path):  # nobody listens there any more
        assert (tmp_path / "here").stat().st_mode & 0o077 == 0
        with pytest.raises(PortInUse):
            listening(path)
