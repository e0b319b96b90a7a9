"""Delay lines: everything arrives, in order, once its time has come, and not much later."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from mesh_llm.lab import delay
from mesh_llm.lab.conditions import Conditions, Way
from mesh_llm.lab.delay import DelayDoor, Line, delay_lines, joined
from tests.support.waiting import until

WAIT_S = 20.0
SLACK_S = 3.0
"""For a line or the other side to be scheduled, on a machine that is busy with something else.

How near a line comes to what was asked for is what `bench` prints beside every figure taken over one.
"""


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


Pair = Callable[[], tuple[socket.socket, socket.socket]]
PAIRS = pytest.mark.parametrize("pair", [unix_pair, tcp_pair])


@contextmanager
def ends_of(
    line_count: int, delay_s: float, pair: Pair = unix_pair
) -> Iterator[tuple[list[Line], list[socket.socket]]]:
    """Lines, and for each its two outer ends: left, right, left, right …"""
    lines, ends = [], []
    for _ in range(line_count):
        left, inner_left = pair()
        right, inner_right = pair()
        far = Conditions(delay_s=delay_s)
        lines.append(Line(one=inner_left, other=inner_right, there=far, back=far))
        ends += [left, right]
    for end in ends:
        end.settimeout(WAIT_S)
    try:
        yield lines, ends
    finally:
        for end in ends:
            end.close()


def receive(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := end.recv(size - len(data))):
        data += piece
    return bytes(data)


def ping(source: socket.socket, target: socket.socket, count: int) -> list[float]:
    """One way, in milliseconds, one chunk at a time."""
    delays = []
    for number in range(count):
        message = number.to_bytes(8, "big")
        sent = time.perf_counter()
        source.sendall(message)
        assert receive(target, len(message)) == message
        delays.append(1000 * (time.perf_counter() - sent))
    return delays


@PAIRS
async def test_content_and_order_under_load(pair: Pair) -> None:
    """Both directions of two lines at once, in pieces of every size."""
    size = 6 << 20
    with ends_of(2, 0.005, pair) as (lines, ends):
        sent, found = {}, {}

        def send(index: int) -> None:
            noise = random.Random(index)
            data = noise.randbytes(size)
            sent[index] = hashlib.sha256(data).hexdigest()
            at = 0
            while at < size:
                step = noise.choice((1, 100, 5000, 300_000))
                ends[index].sendall(data[at : at + step])
                at += step

        def check(index: int) -> None:
            # What goes in at one end comes out at the other.
            found[index ^ 1] = hashlib.sha256(receive(ends[index], size)).hexdigest()

        async with delay_lines(lines) as running:
            work = [threading.Thread(target=job, args=(i,)) for i in range(4) for job in (send, check)]
            for thread in work:
                thread.start()
            for thread in work:
                await asyncio.to_thread(thread.join, WAIT_S)
        assert found == sent
        assert [data_links.size_bytes for data_links in running.passages] == [size] * 4


@PAIRS
async def test_the_delay_is_what_was_asked_for_and_reported(pair: Pair) -> None:
    with ends_of(1, 0.010, pair) as (lines, (left, right)):
        async with delay_lines(lines) as running:
            there = await asyncio.to_thread(ping, left, right, 60)
            back = await asyncio.to_thread(ping, right, left, 60)
    assert min(there + back) >= 10
    assert len(running.passages) == 2
    for measured, data_links in zip((there, back), running.passages, strict=True):
        assert data_links.chunks == 60
        assert data_links.size_bytes == 60 * 8
        # Seen from outside: the way through the kernel, and back into this process, comes on top.
        assert 10 <= data_links.median_ms <= statistics.median(measured) < 10 + 1000 * SLACK_S
        assert data_links.median_ms <= data_links.worst_ms <= max(measured)
    assert running.report().count(" × 60") == 2
    assert f"{running.passages[0].median_ms:.2f} ms" in running.report()


async def test_chunks_do_not_wait_for_each_other() -> None:
    """Ten on their way at a time take one delay, not ten."""
    delay_s, count, pause_s = 1.0, 10, 0.02
    with ends_of(1, delay_s) as (lines, (left, right)):
        async with delay_lines(lines) as running:
            await asyncio.to_thread(ping, left, right, 1)  # its child runs now
            sent: list[float] = []

            def send() -> None:
                for _ in range(count):
                    sent.append(time.perf_counter())
                    left.sendall(b"x")
                    time.sleep(pause_s)  # or the line would read several at once

            sending = asyncio.create_task(asyncio.to_thread(send))
            arrived = []
            for _ in range(count):
                assert await asyncio.to_thread(right.recv, 1) == b"x"
                arrived.append(time.perf_counter())
            await sending
    assert running.passages[0].size_bytes == 8 + count
    for before, after in zip(sent, arrived, strict=True):
        assert after - before >= delay_s
    assert arrived[-1] - sent[0] < 2 * delay_s + SLACK_S < count * delay_s


@PAIRS
async def test_the_end_takes_as_long_as_everything_else(pair: Pair) -> None:
    delay_s = 0.1
    with ends_of(1, delay_s, pair) as (lines, (left, right)):
        async with delay_lines(lines):
            left.sendall(b"last words")
            closed = time.perf_counter()
            left.close()
            assert await asyncio.to_thread(receive, right, 100) == b"last words"
            waited = time.perf_counter() - closed
    assert delay_s <= waited < delay_s + SLACK_S


async def test_nothing_is_left() -> None:
    """Lines end with their block, also by an error in it; and both ends notice."""
    process = psutil.Process()
    before = {child.pid for child in process.children()}
    with ends_of(1, 0.001) as (lines, (left, right)):

        async def fail() -> None:
            async with delay_lines(lines):
                assert len(process.children()) == len(before) + 1
                await asyncio.to_thread(ping, left, right, 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert {child.pid for child in process.children()} == before
        assert (left.recv(1), right.recv(1)) == (b"", b"")
        assert [end.fileno() for line in lines for end in (line.one, line.other)] == [-1, -1]


async def test_lines_are_read_while_they_run() -> None:
    with ends_of(1, 0.001) as (lines, (left, right)):
        async with delay_lines(lines) as running:
            assert [data_links.size_bytes for data_links in await running.read()] == [0, 0]
            left.sendall(b"abc")
            assert await asyncio.to_thread(receive, right, 3) == b"abc"
            assert [data_links.size_bytes for data_links in await running.read()] == [3, 0]
            right.sendall(b"four")
            assert await asyncio.to_thread(receive, left, 4) == b"four"
            assert [data_links.size_bytes for data_links in await running.read()] == [3, 4]


async def test_a_door_leads_every_caller_to_its_target_late() -> None:
    delay_s = 0.02
    with socket.create_server(("127.0.0.1", 0)) as target:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        far = Conditions(delay_s=delay_s)
        door = DelayDoor(listener=listener, target=target.getsockname(), there=far, back=far)
        async with delay_lines((), [door]) as running:
            for number in range(1, 3):
                with socket.create_connection(address, timeout=WAIT_S) as caller:
                    started = time.perf_counter()
                    caller.sendall(b"hello")
                    met, _ = await asyncio.to_thread(target.accept)
                    with met:
                        assert await asyncio.to_thread(receive, met, 5) == b"hello"
                        assert time.perf_counter() - started >= delay_s
                        met.sendall(b"yes")
                        assert await asyncio.to_thread(receive, caller, 3) == b"yes"
                there, back = await running.read()
                assert (there.size_bytes, back.size_bytes) == (5 * number, 3 * number)


async def test_a_door_to_nowhere_closes_on_its_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nowhere = gone.getsockname()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    async with delay_lines((), [DelayDoor(listener=listener, target=nowhere)]):
        with socket.create_connection(address, timeout=WAIT_S) as caller:
            assert await asyncio.to_thread(caller.recv, 1) == b""


@contextmanager
def answering(listener: socket.socket, target: tuple[str, int]) -> Iterator[socket.socket]:
    """A caller of a door in this process."""
    far = Conditions(delay_s=0.0)
    ways = (Way(far, seed=""), Way(far, seed=""))
    door = threading.Thread(target=delay._answer, args=(listener, target, ways, None), daemon=True)
    door.start()
    with listener, socket.create_connection(listener.getsockname(), timeout=WAIT_S) as caller:
        yield caller
        listener.shutdown(socket.SHUT_RDWR)
    door.join(WAIT_S)
    assert not door.is_alive()


def test_a_target_that_does_not_answer_holds_up_its_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, release = iter(range(2)), threading.Event()
    connected = delay._connected

    def slow_at_first(target: tuple[str, int]) -> socket.socket:
        if next(calls) == 0:
            release.wait(WAIT_S)
        return connected(target)

    monkeypatch.setattr(delay, "_connected", slow_at_first)
    listener, target = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    target.settimeout(WAIT_S)
    with target, answering(listener, target.getsockname()) as first:
        with socket.create_connection(listener.getsockname(), timeout=WAIT_S) as second:
            far, _ = target.accept()
            with far:
                second.sendall(b"second")
                assert receive(far, 6) == b"second"
        release.set()
        late, _ = target.accept()
        with late:
            first.sendall(b"first")
            assert receive(late, 5) == b"first"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses callers")
def test_a_caller_is_let_go_when_the_target_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay, "_CONNECT_S", 0.3)
    listener, target = (
        socket.create_server(("127.0.0.1", 0)),
        socket.create_server(("127.0.0.1", 0), backlog=0),
    )
    # Its queue is full: who comes later waits for somebody to be taken in.
    address = target.getsockname()
    with target, socket.create_connection(address), answering(listener, address) as caller:
        assert caller.recv(1) == b""


class Exhausted(socket.socket):
    """Has no descriptor left for the first who calls."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures == 0:
            self.failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_door_stays_open_after_a_caller_that_could_not_be_taken_in() -> None:
    listener = Exhausted(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    target = socket.create_server(("127.0.0.1", 0))
    target.settimeout(WAIT_S)
    with target, answering(listener, target.getsockname()) as caller:
        far, _ = target.accept()
        with far:
            caller.sendall(b"here")
            assert receive(far, 4) == b"here"


def test_a_link_in_this_process_is_as_long_as_it_was_made() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)  # as links of a node are
    end = joined(near, delay_s=0.05)
    with end, far:
        for one, other in ((end, far), (far, end)):
            began = time.perf_counter()
            one.sendall(b"token")
            assert other.recv(16) == b"token"
            assert time.perf_counter() - began >= 0.05
        far.shutdown(socket.SHUT_RDWR)
        assert end.recv(16) == b""
    until(lambda: near.fileno() == -1, within_s=10, what="the line has let go of its link")
