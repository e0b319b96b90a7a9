"""Whether an engine is silent: here it is a socket that answers when it likes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from mesh_llm.engine import health_check

SILENCE_S = 2.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "BEAT_S", 0.01)
    monkeypatch.setattr(health_check, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(health_check, "_PIECE_S", 0.1)


class Engine:
    """Answers each question after `delay_s`; never, where that is None."""

    def __init__(self, delay_s: float | None) -> None:
        self.delay_s = delay_s
        self.port = 0
        self.questions: list[bytes] = []
        self.asked = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.questions.append(await reader.readuntil(b"\r\n\r\n"))
        self.asked.set()
        if self.delay_s is not None:
            await asyncio.sleep(self.delay_s)
            writer.write(ANSWER)

    def answer_now(self) -> None:
        self.delay_s = 0.0
        for writer in self._writers:
            writer.write(ANSWER)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[asyncio.Task[None]]:
        """The task that waits for its silence."""
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        task = asyncio.create_task(health_check.until_silent(self.port))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            server.close()
            for writer in self._writers:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    async def asked_again(self, times: int) -> None:
        async with asyncio.timeout(20):
            for _ in range(times):
                self.asked.clear()
                await self.asked.wait()


async def test_one_that_answers_is_asked_again_and_again() -> None:
    engine = Engine(0.0)
    async with engine.listening() as silent:
        await engine.asked_again(5)
        assert not silent.done()
    assert set(engine.questions) == {b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"}


async def test_one_that_is_slow_with_every_answer_is_not_silent() -> None:
    engine = Engine(0.25)
    async with engine.listening() as silent:
        await engine.asked_again(4)
        assert not silent.done()


async def test_one_that_takes_the_question_and_keeps_quiet_is_silent() -> None:
    engine = Engine(None)
    async with engine.listening() as silent, asyncio.timeout(20):
        await engine.asked.wait()
        began = time.monotonic()
        await silent
        assert time.monotonic() - began > SILENCE_S - 0.5
    assert len(engine.questions) == 1


async def test_one_that_does_not_even_listen_is_silent() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with asyncio.timeout(20):
            await health_check.until_silent(closed.getsockname()[1])


async def test_a_nap_of_the_node_itself_does_not_count() -> None:
    engine = Engine(None)
    async with engine.listening() as silent:
        await engine.asked_again(1)
        # Nothing of this process runs meanwhile: the engine may have answered long ago.
        time.sleep(1.5 * SILENCE_S)  # noqa: ASYNC251
        engine.answer_now()
        await engine.asked_again(3)
        assert not silent.done()
