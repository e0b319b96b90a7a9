"""Run `mesh-llm` as a person would: a process of its own, all of whose descendants can be found again."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from tests.support.waiting import LOOK_S, Patience, until

MESH_LLM = (sys.executable, "-W", "error", "-m", "mesh_llm")
MARKER = "MESH_LLM_TEST_RUN"
QUIET = (
    *("MESH_LLM_JOIN", "MESH_LLM_API_KEY", "MESH_LLM_RELAY_TOKEN"),
    *("MESH_LLM_HOME", "CXX", "PYTHONPATH"),
)
"""Of the person who runs the tests: not for the processes under test."""
ALONE = {"MESH_LLM_BIND_IP": "127.0.0.1", "MESH_LLM_NO_RELAY": "1"}
"""Nodes under test: no packet leaves this machine."""
WAIT_S = 60.0
"""For anything that a program does, on a machine that is busy with something else: seconds otherwise."""
END_S = 40.0
"""For a program that is told to end, on a machine that is busy with something else: a second otherwise."""
READ_S = 30.0
"""For the last words of a program that has ended: they are in a pipe already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    status: int
    stdout: str
    stderr: str


def marked(value: str) -> list[psutil.Process]:
    """Living processes that inherited the marker `value`, wherever they were moved to."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Running:
    """A program under test. Leaving the block ends it, and fails if it leaves anything behind."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        typed: str | None = None,
    ) -> None:
        """`typed`: what a person types, all at once."""
        self.marker = secrets.token_hex(8)
        inherited = {name: value for name, value in os.environ.items() if name not in QUIET}
        self.process = subprocess.Popen(
            [os.fspath(part) for part in argv],
            stdin=subprocess.DEVNULL if typed is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**inherited, **ALONE, **(env or {}), MARKER: self.marker},
            cwd=cwd,
        )
        if self.process.stdin is not None:
            with self.process.stdin as stdin:
                stdin.write(typed or "")
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, self._lines[name]), name=name)
            for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: IO[str] | None, lines: list[str]) -> None:
        assert pipe is not None
        with pipe:
            lines.extend(pipe)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return "".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        return "".join(self._lines["stderr"])

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        """The program itself and everything that it started."""
        return marked(self.marker)

    def descendants(self) -> list[psutil.Process]:
        return [process for process in self.family() if process.pid != self.pid]

    def command_lines(self) -> dict[psutil.Process, list[str]]:
        """Of its whole family, but for those that end while they are looked at."""
        lines = {}
        for process in self.family():
            with suppress(psutil.Error):
                lines[process] = process.cmdline()
        return lines

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def _hear_out(self, within_s: float = READ_S) -> None:
        """Its last words are in the pipes when it has ended, and have to be read from there."""
        deadline = time.monotonic() + within_s
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def until(self, condition: Callable[[], object], *, what: str, within_s: float = WAIT_S) -> None:
        """Wait for `condition`; give up at once when the program ends before it holds."""

        held: list[object] = []

        def holds_or_ended() -> bool:
            # Of its end first: what it did before that may still make the condition hold.
            has_ended = not self.running
            if has_ended:
                self._hear_out(5.0)
            # Once is enough: what holds now may be over at the next look.
            held.append(condition())
            return bool(held[-1]) or has_ended

        try:
            until(holds_or_ended, within_s=within_s, what=what)
            assert held[-1], f"ended with {self.process.poll()} before: {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}") from None

    def until_said(self, text: str, *, within_s: float = WAIT_S) -> None:
        self.until(lambda: text in self.stdout + self.stderr, what=f"it says {text!r}", within_s=within_s)

    def wait(self, *, within_s: float = WAIT_S) -> Ended:
        """Its end, by itself; nothing of it may be left then."""
        if not self._has_ended(within_s):
            raise AssertionError(f"still runs after {within_s:g} s\n{self.stdout}{self.stderr}")
        status = self.process.wait()
        left = self.descendants()
        self._hear_out()
        assert left == [], f"left running: {left}\n{self.stdout}{self.stderr}"
        return Ended(status=status, stdout=self.stdout, stderr=self.stderr)

    def _has_ended(self, within_s: float) -> bool:
        patience = Patience(within_s)
        while True:
            is_last = patience.is_over
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_S)
                return True
            if is_last:
                return False

    def until_no_descendants(self, *, within_s: float) -> None:
        until(lambda: not self.descendants(), within_s=within_s, what="everything it started is gone")

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.process.terminate()
            if not self._has_ended(END_S):
                self.process.kill()
        self.process.wait(END_S)
        left = self.descendants()
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        self._hear_out()
        assert error is not None or left == [], f"left running: {left}"


@contextmanager
def start(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Running]:
    with Running([*MESH_LLM, *arguments], env=env, cwd=cwd) as running:
        yield running


def mesh_llm(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    within_s: float = 60.0,
) -> Ended:
    """`mesh-llm ARGUMENTS`, to its end."""
    with start(*arguments, env=env, cwd=cwd) as running:
        return running.wait(within_s=within_s)
