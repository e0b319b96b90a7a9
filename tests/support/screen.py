"""Programs in a terminal, and what a person sees there: a pseudo-terminal, read by an emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import secrets
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pyte

from tests.support.command import ALONE, END_S, MARKER, MESH_LLM, QUIET, marked
from tests.support.waiting import until

_SCROLL_BACK = 2000


class Screen:
    """A terminal with one program in it, which leads its session as a shell's foreground job does."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.marker = secrets.token_hex(8)
        self._screen = pyte.HistoryScreen(columns, rows, history=_SCROLL_BACK, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""
        """Everything that the program has written."""
        self._master, self._slave = pty.openpty()
        self._set_size(columns, rows)
        self.mode_before = self.mode()
        inherited = {name: value for name, value in os.environ.items() if name not in (*QUIET, "NO_COLOR")}
        # The emulator cuts long lines off when it becomes narrower, as xterm does.
        terminal = {"TERM": "xterm-256color", "XTERM_VERSION": "pyte"}
        self.process = subprocess.Popen(
            [os.fspath(part) for part in argv],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**inherited, **ALONE, **terminal, **(env or {}), MARKER: self.marker},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._taking = threading.Event()
        self._taking.set()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    def _read(self) -> None:
        while True:
            self._taking.wait()
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    # -- what a person sees --------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """The screen, from its top, without the empty lines below."""
        with self._lock:
            shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def everything(self) -> str:
        """With what has scrolled away; lines that the window has wrapped are wrapped."""
        with self._lock:
            above = [
                "".join(line[x].data for x in range(self._screen.columns)).rstrip()
                for line in self._screen.history.top
            ]
        return "\n".join([*above, *self.lines])

    def has_cursor(self) -> bool:
        with self._lock:
            return not self._screen.cursor.hidden

    @property
    def colours(self) -> set[str]:
        with self._lock:
            return {cell.fg for line in self._screen.buffer.values() for cell in line.values()} - {"default"}

    # -- what a person does --------------------------------------------------------------------

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def set_mode(self, mode: list[Any]) -> None:
        """As a shell does for itself."""
        termios.tcsetattr(self._slave, termios.TCSANOW, mode)

    def freeze(self) -> None:
        """Take nothing more from the program, as a window that hangs."""
        self._taking.clear()

    def thaw(self) -> None:
        self._taking.set()

    def mode(self) -> list[Any]:
        """The terminal's own settings; without a flag that says that typed keys wait to be read again."""
        mode = termios.tcgetattr(self._slave)
        mode[3] &= ~getattr(termios, "PENDIN", 0)
        return mode

    # -- the program ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, condition: Callable[[], object], *, what: str, within_s: float = 60.0) -> None:
        held: list[object] = []

        def holds_or_ended() -> bool:
            has_ended = self.process.poll() is not None
            # Once is enough: a picture that shows it now may be drawn over at the next look.
            held.append(condition())
            return bool(held[-1]) or has_ended

        try:
            until(holds_or_ended, within_s=within_s, what=what)
            assert held[-1], f"ended with {self.process.poll()} before: {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- terminal\n{self.everything}") from None

    def until_seen(self, text: str, *, within_s: float = 60.0) -> None:
        self.until(lambda: text in self.text, what=f"the screen shows {text!r}", within_s=within_s)

    def until_lines(self, holds: Callable[[list[str]], object], *, what: str) -> list[str]:
        """The first picture for which it holds: others may be half drawn, or drawn over at the next look."""
        pictures: list[list[str]] = []

        def has_come() -> bool:
            pictures.append(self.lines)
            return bool(holds(pictures[-1]))

        self.until(has_come, what=what)
        return pictures[-1]

    def wait(self, *, within_s: float = 60.0) -> int:
        """Its end, by itself; nothing of it may be left then, and all that it wrote has been read."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {within_s:g} s\n{self.everything}") from None
        left = [process for process in marked(self.marker) if process.pid != self.pid]
        assert left == [], f"left running: {left}\n{self.everything}"
        self.catch_up()
        return status

    def catch_up(self) -> None:
        """Let the reader see a mark that comes after everything else."""
        mark = secrets.token_hex(8).encode()
        os.write(self._slave, b"\x1b]0;" + mark + b"\x07")
        until(lambda: mark in self.raw, within_s=30, what="the terminal has shown everything")

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(END_S)
        left = marked(self.marker)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        os.close(self._slave)
        # Wakes the reader: without a slave there is nothing more to come.
        self._reader.join(5)
        os.close(self._master)
        assert error is not None or left == [], f"left running: {left}"


def in_terminal(
    *arguments: str | Path, columns: int = 100, rows: int = 30, env: Mapping[str, str] | None = None
) -> Screen:
    """`mesh-llm ARGUMENTS`, as a person types it."""
    return Screen([*MESH_LLM, *arguments], columns=columns, rows=rows, env=env)
