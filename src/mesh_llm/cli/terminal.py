"""The lower end of a terminal: a picture that is drawn over and over, below lines that stay.

Lines that are told go above the picture and scroll up as they would without it, so that
whoever scrolls back, selects or pipes through `tee` later finds them whole. The screen is
never cleared or swapped for another one.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from mesh_llm.cli import live_view
from mesh_llm.cli.output import is_terminal

TERMINAL_PENDING_BYTES = 256 << 10
"""Kept for a terminal that does not take it (a frozen window, a lost ssh session): thousands of lines."""
TERMINAL_LAST_S = 0.5
"""For a terminal to take the last lines at the end: it does at once, or it is stuck."""


_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_LINE, _LINE_ABOVE = "\r\x1b[2K", "\x1b[A"


def is_live() -> bool:
    """Whether standard output is a terminal on which something can be drawn."""
    return is_terminal(sys.stdout) and os.environ.get("TERM", "dumb") not in ("", "dumb")


class Terminal:
    """Standard output, and standard input for keys. `with` it: however the block ends, all is as before.

    Writing never waits: a window that is frozen, or an ssh session whose network is gone,
    would otherwise stop the node in the middle of its work for others.
    """

    def __init__(self) -> None:
        self._in = sys.stdin.fileno() if is_terminal(sys.stdin) else None
        self._out, self._own = _without_waiting(sys.stdout.fileno())
        self._encoding = sys.stdout.encoding or "utf-8"
        self.colour = not os.environ.get("NO_COLOR")
        # After the window became narrower, most terminals wrap what is too long. Those that cut it
        # off would have lines erased that are not the picture's.
        self._wraps_anew = "XTERM_VERSION" not in os.environ or "TMUX" in os.environ
        self._before: list[Any] | None = None
        self._drawn: list[live_view.Line] = []
        self._pending = b""
        self.is_entered = False

    def __enter__(self) -> Terminal:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self._drain()
        if self._own:
            os.close(self._out)

    @property
    def keys(self) -> int | None:
        """Where keys can be read, one by one."""
        return self._in

    @property
    def size(self) -> live_view.Size:
        with suppress(OSError):
            found = os.get_terminal_size(self._out)
            if found.columns and found.lines:
                return live_view.Size(columns=found.columns, rows=found.lines)
        return live_view.Size(columns=80, rows=24)

    def is_ours(self) -> bool:
        """Whether this process is in the foreground: in the background the terminal is the shell's."""
        try:
            return os.tcgetpgrp(self._out) == os.getpgrp()
        except OSError:
            # Not the terminal that controls this process: nobody to share it with.
            return True

    def enter(self) -> None:
        """Keys come one by one and are not shown, the cursor is hidden. Not from the background."""
        if self.is_entered or not self.is_ours():
            return
        self.is_entered = True
        if self._in is not None:
            with suppress(termios.error):
                mode = termios.tcgetattr(self._in)
                # After `forget` the mode before the first time is the one to go back to.
                self._before = self._before or termios.tcgetattr(self._in)
                mode[3] &= ~(termios.ICANON | termios.ECHO)
                mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
                termios.tcsetattr(self._in, termios.TCSANOW, mode)
        self._send(_HIDE_CURSOR)

    def leave(self, *, keep: bool = False) -> None:
        """As it was before, and without the picture, unless it is to be kept."""
        if not self.is_entered:
            return
        self.is_entered = False
        self._send((("\n" if self._drawn else "") if keep else self._erasure()) + _SHOW_CURSOR)
        self._drawn = []
        # From the background it would stop this process, and the shell has set its own mode by then.
        if self._before is not None and self._in is not None and self.is_ours():
            # At once: waiting for the output to be taken could be for ever.
            with suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, self._before)
        self._before = None

    def forget(self) -> None:
        """Somebody else had the terminal: where the picture was, and in which mode it is, is not known."""
        self.is_entered = False
        self._drawn = []

    def tell(self, text: str) -> None:
        """A line that stays, above the picture."""
        self._send(self._erasure() + text + "\n")
        self._drawn, drawn = [], self._drawn
        self._draw(drawn)

    def draw(self, lines: Sequence[live_view.Line]) -> None:
        """The picture, in place of the one before; nothing where it is the same, or cannot be taken."""
        if not self.is_entered or self._flush() or lines == self._drawn:
            return
        self._draw(list(lines))

    def redraw(self, lines: Sequence[live_view.Line]) -> None:
        """After the window changed: even the same picture."""
        self._send(self._erasure())
        self._drawn = []
        self.draw(lines)

    def _draw(self, lines: list[live_view.Line]) -> None:
        if self.is_entered and lines:
            painted = "\n".join(live_view.painted(line, colour=self.colour) for line in lines)
            self._send(self._erasure() + painted)
            self._drawn = lines

    def _erasure(self) -> str:
        """From the end of the picture to its beginning, wherever the window has put that.

        Line by line: where the picture begins at the top of the window, to erase all below would be to
        clear the screen, and some terminals keep what was cleared in their scroll-back.
        """
        if not self._drawn:
            return ""
        rows = live_view.rows_taken(self._drawn, self.size.columns) if self._wraps_anew else len(self._drawn)
        return _LINE_ABOVE.join([_ERASE_LINE] * rows)

    def _send(self, text: str) -> None:
        data = text.encode(self._encoding, "replace")
        if len(self._pending) + len(data) <= TERMINAL_PENDING_BYTES:
            self._pending += data
        self._flush()

    def _flush(self) -> bool:
        """Write what the terminal takes. True while something is left."""
        while self._pending:
            try:
                self._pending = self._pending[os.write(self._out, self._pending) :]
            except BlockingIOError:
                return True
            except OSError:
                # It is gone, and the hang-up signal says so to whoever has to act.
                self._pending = b""
        return False

    def _drain(self) -> None:
        deadline = time.monotonic() + TERMINAL_LAST_S
        while self._flush() and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._out], [], left)


def _without_waiting(descriptor: int) -> tuple[int, bool]:
    """A way of our own to the same terminal: on the given one not to wait would hold for the shell, too."""
    try:
        name = os.ttyname(descriptor)
        return os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC), True
    except OSError:
        return descriptor, False
