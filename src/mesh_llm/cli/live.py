"""What a person sees of a running node, once a second, below the lines that it tells."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mesh_llm.cli import live_view
from mesh_llm.cli.terminal import Terminal
from mesh_llm.defaults import CONTROL_TIMEOUT_S
from mesh_llm.engine.process import obey
from mesh_llm.errors import MeshError, NodeNotRunning
from mesh_llm.status_schema import Status, from_document
from mesh_llm.types import Progress

LIVE_REDRAW_S = 1.0
"""Between two looks of the live view at its node: what a person can follow, and next to no work."""
LIVE_PROGRESS_S = 0.25
"""Between two pictures of a bar that moves."""
LIVE_WATCH_EVENTS = 5
"""Last events below the picture of `status --watch`; a node's own terminal has them all above it."""


Ask = Callable[[], Awaitable[dict[str, Any] | None]]
"""For a node's status; None before it has one."""


class Live:
    """The picture of one node on one terminal. `run` lives as long as somebody looks."""

    def __init__(
        self, terminal: Terminal, *, on_quit: Callable[[], None] = lambda: None, layers: bool = False
    ) -> None:
        self._terminal = terminal
        self.on_quit = on_quit
        self.question: Callable[[Status], str] = lambda _: ""
        """What to ask before the key that quits counts; empty: nothing."""
        self._asking = ""
        self._layers = layers
        self._status: Status | None = None
        self._steps: dict[str, Progress] = {}
        self._events: deque[str] = deque(maxlen=LIVE_WATCH_EVENTS)
        self._wake = asyncio.Event()
        self._moved = False
        self._reading: int | None = None

    # -- what is told --------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """A line that stays; what was under way before it has led to it."""
        self._steps = {}
        self._terminal.tell(text)

    def happened(self, line: str) -> None:
        """One of the last events, at the lower end: for a picture from outside, with no lines above it."""
        self._events.append(line)
        self._steps = {}
        self._stir()

    def progress(self, step: Progress) -> None:
        if 0 < step.total <= step.done:
            self._steps.pop(step.what, None)
        else:
            self._steps[step.what] = step
        self._stir()

    def _stir(self) -> None:
        self._moved = True
        self._wake.set()

    def close(self) -> None:
        """No picture any more; lines are told as before."""
        self._terminal.leave()

    # -- what is drawn -------------------------------------------------------------------------

    async def run(self, ask: Ask) -> None:
        """Returns only by being cancelled, or by what `ask` raises when the node is gone."""
        with self._attentive():
            while True:
                self._status = await self._asked(ask) or self._status
                next_look = asyncio.get_running_loop().time() + LIVE_REDRAW_S
                self._draw()
                while (left := next_look - asyncio.get_running_loop().time()) > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left):
                            await self._wake.wait()
                            await asyncio.sleep(LIVE_PROGRESS_S)
                    self._wake.clear()
                    if self._moved:
                        self._draw()

    async def _asked(self, ask: Ask) -> Status | None:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                document = await ask()
                return from_document(Status, document) if document is not None else None
        except NodeNotRunning:
            raise
        except (MeshError, TimeoutError):
            # Busy, or between two plans: the last picture stays.
            return None

    def _frame(self) -> list[live_view.Line]:
        size = self._terminal.size
        state = live_view.LiveState(
            status=self._status,
            progress=list(self._steps.values()),
            events=list(self._events),
            layers=self._layers,
            keys=self._terminal.keys is not None,
            question=self._asking,
        )
        # A row is left for the line above: a picture of the whole height would scroll at every change.
        return live_view.frame(state, live_view.Size(columns=size.columns, rows=size.rows - 1))

    def _draw(self) -> None:
        self._moved = False
        if not self._terminal.is_ours():
            # In the background: the shell is drawing there. Lines that are told still come.
            self._terminal.forget()
            self._stop_reading()
            return
        # Brought to the foreground, perhaps without having been stopped before.
        self._terminal.enter()
        self._start_reading()
        self._terminal.draw(self._frame())

    # -- keys and signals ----------------------------------------------------------------------

    @contextmanager
    def _attentive(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        heard = {
            signal.SIGWINCH: self._on_resize,
            signal.SIGTSTP: self._on_stop,
            signal.SIGCONT: self._on_continue,
            signal.SIGQUIT: self._on_end,
        }
        for number, handler in heard.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            self._stop_reading()
            for number in heard:
                loop.remove_signal_handler(number)

    def _start_reading(self) -> None:
        keys = self._terminal.keys
        if keys is not None and self._reading is None:
            asyncio.get_running_loop().add_reader(keys, self._on_key, keys)
            self._reading = keys

    def _stop_reading(self) -> None:
        if self._reading is not None:
            asyncio.get_running_loop().remove_reader(self._reading)
            self._reading = None

    def _on_key(self, keys: int) -> None:
        if not self._terminal.is_ours():
            # A read from the background would stop the process, and the key is the shell's.
            self._stop_reading()
            return
        try:
            typed = os.read(keys, 64)
        except OSError:
            typed = b""
        if not typed:
            # The terminal is gone; what comes of that is the hang-up signal's to say.
            self._stop_reading()
        else:
            self._on_typed(typed)

    def _on_typed(self, typed: bytes) -> None:
        """The key that quits, twice where others would notice."""
        asked, self._asking = self._asking, ""
        if b"q" in typed.lower():
            question = "" if asked or self._status is None else self.question(self._status)
            if not question:
                self.on_quit()
            self._asking = question
        if asked or self._asking:
            self._stir()

    def _on_resize(self) -> None:
        if self._terminal.is_entered and self._terminal.is_ours():
            self._terminal.redraw(self._frame())

    def _on_stop(self) -> None:
        """Ctrl-Z: the shell gets its terminal back as it was. Going on is the next signal's."""
        self._terminal.leave()
        self._stop_reading()
        obey(signal.SIGTSTP)

    def _on_continue(self) -> None:
        """Also after a stop that cannot be caught: what is on the screen since then is not ours to erase."""
        self._terminal.forget()
        self._draw()

    def _on_end(self) -> None:
        self._terminal.leave()
        obey(signal.SIGQUIT)
