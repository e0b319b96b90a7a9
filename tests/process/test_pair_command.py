"""`mesh-llm join` and `invite --pair` in a person's terminal: what Ctrl-C does to them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mesh_llm.home import Home
from tests.support.command import MESH_LLM
from tests.support.screen import Screen

SOON_S = 20.0
"""A second on a quiet machine."""

# `mesh-llm join` on a network where two meshes are announced, or where nobody answers any more.
FOUND = """
import asyncio, sys
from mesh_llm.cli import main, pair
from mesh_llm.pairing.announcement import SERVICE, read

async def find(**_):
    if "searching" in sys.argv:
        print("searching", flush=True)
        await asyncio.sleep(3600)
    return [read(f"{name}.{SERVICE}", {b"id": b"ab" * 32}, ["127.0.0.1"], 9) for name in ("Home", "Office")]

async def prove(found, *, on_proven, **_):
    on_proven()
    await asyncio.sleep(3600)

pair.find, pair.pair = find, prove
main.main()
"""


@pytest.fixture(autouse=True)
def interrupts_count() -> Iterator[None]:
    """The tests may run in a background where their programs would ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ended_by_ctrl_c(screen: Screen) -> None:
    screen.press(b"\x03")
    assert screen.wait(within_s=SOON_S) == 130
    assert "Traceback" not in screen.everything
    assert "Error" not in screen.everything
    assert screen.mode() == screen.mode_before


@pytest.mark.parametrize(
    ("mesh", "typed", "seen"),
    [
        ("searching", b"", "searching"),
        (None, b"", "Which one:"),
        ("Home", b"", "Code:"),
        ("Home", b"123456\n", "Waiting for the owner to agree"),
    ],
)
def test_ctrl_c_ends_join_at_once(home: Path, mesh: str | None, typed: bytes, seen: str) -> None:
    argv: list[str | Path] = [sys.executable, "-W", "error", "-c", FOUND, "join"]
    argv += [*([mesh] if mesh else []), "--home", home]
    with Screen(argv) as screen:
        if typed:
            screen.until_seen("Code:")
            screen.press(typed)
        screen.until_seen(seen)
        ended_by_ctrl_c(screen)
        assert list(home.iterdir()) == []


class Offering:
    """The control socket of a node that announces a mesh; somebody waits to be let in, or nobody does."""

    def __init__(self, *, is_somebody_there: bool = False, is_slow: bool = False) -> None:
        self.is_open = False
        self.answered: list[bool] = []
        self._waiting = {"id": "1", "name": "laptop", "address": "192.168.1.7"} if is_somebody_there else None
        self._is_slow = is_slow
        self.asked = threading.Event()

    async def begin(self, request: web.Request) -> web.Response:
        self.is_open = True
        self.asked.set()
        if self._is_slow:
            await asyncio.sleep(3600)
        return web.json_response({"label": "desk", "code": "123 456"})

    async def state(self, request: web.Request) -> web.Response:
        self.asked.set()
        return web.json_response({"open": self.is_open, "waiting": self._waiting, "admitted": None})

    async def answer(self, request: web.Request) -> web.Response:
        self.answered.append((await request.json())["accept"])
        self._waiting = None
        return web.json_response({})

    async def end(self, request: web.Request) -> web.Response:
        self.is_open = False
        return web.json_response({"admitted": None})


@contextmanager
def serving(home: Path, offering: Offering) -> Iterator[None]:
    where, loop, up = Home(home), asyncio.new_event_loop(), threading.Event()
    where.create()
    app = web.Application()
    handlers: dict[str, Callable[[web.Request], Any]] = {
        "/api/pair": offering.begin,
        "/api/pair-answer": offering.answer,
        "/api/pair-end": offering.end,
    }
    for path, handler in handlers.items():
        app.router.add_post(path, handler)
    app.router.add_get("/api/pair", offering.state)

    async def serve() -> None:
        # A request that hangs is not waited for.
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(where.control_socket)).start()
        up.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="control socket")
    thread.start()
    try:
        assert up.wait(SOON_S)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(SOON_S)
        loop.close()


@pytest.mark.parametrize(
    ("offering", "seen"),
    [
        (Offering(), "Code: 123 456"),
        (Offering(is_somebody_there=True), "Let it in?"),
        (Offering(is_slow=True), None),
    ],
    ids=["nobody is there", "somebody waits", "it is being opened"],
)
def test_ctrl_c_ends_an_offer_and_closes_it(home: Path, offering: Offering, seen: str | None) -> None:
    with serving(home, offering), Screen([*MESH_LLM, "invite", "--pair", "--home", home]) as screen:
        screen.until(offering.asked.is_set, what="the node is asked")
        if seen is not None:
            screen.until_seen(seen)
        ended_by_ctrl_c(screen)
        assert not offering.is_open
        assert offering.answered == []


def test_an_offer_ends_with_its_terminal(home: Path) -> None:
    offering = Offering()
    with serving(home, offering), Screen([*MESH_LLM, "invite", "--pair", "--home", home]) as screen:
        screen.until_seen("Code: 123 456")
        screen.signal(signal.SIGHUP)
        assert screen.wait(within_s=SOON_S) == 129
        assert not offering.is_open
