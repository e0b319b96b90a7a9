"""Child processes: the only module that spawns or signals.

A child belongs to the block that started it:

    async with spawn(argv, ...) as child:
        ...

However that block ends, the child's whole session is told to stop, given a
grace, killed and reaped, and its output has been read to the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from mesh_llm.defaults import CHILD_STOP_GRACE_S
from mesh_llm.engine.diagnostics import printable
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.tasks import uninterrupted

CHILD_STOP_POLL_S = 0.02
CHILD_WRITE_TIMEOUT_S = 10.0
CHILD_LINE_LIMIT_BYTES = 64 << 10
"""Longer lines of a child's output are cut: nobody reads them, and memory is finite."""
NICE = 10
"""A tenth of the processor where others want all of it: with less, a build beside busy engines never ends."""
CHILD_KEPT_LINES = 60
"""Lines of a child's last words: an assertion with its backtrace fits."""


LineSink = Callable[[str], None]

WITHHELD = frozenset({"MESH_LLM_JOIN", "MESH_LLM_API_KEY", "MESH_LLM_RELAY_TOKEN"})
"""Variables with secrets: for the node, and not for compilers, pip and engines that it starts."""

SPIN_COUNT = "1000"
"""How often a waiting thread of libgomp looks before it sleeps; 300,000 times unless it is told.

With that, a token of a small model took 771 ms on two cores that two other programs kept busy; with this,
24 ms. On a quiet machine both take 7 ms.
"""
_SPIN_VARIABLE, _WAIT_POLICY_VARIABLE = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


class Child:
    """A running child and what it said. Made by `spawn` alone."""

    def __init__(self, process: asyncio.subprocess.Process, *, own_session: bool) -> None:
        self._process = process
        self._own_session = own_session
        self.recent: deque[str] = deque(maxlen=CHILD_KEPT_LINES)
        """The last lines of its standard error: what people need when it dies."""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status; negative for a signal, as everywhere in Python."""
        return await self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        # The group, not the pid: a compiler driver or a wrapper would leave its own children running.
        with suppress(ProcessLookupError, PermissionError):
            if self._own_session:
                os.killpg(self._process.pid, number)
            elif self._process.returncode is None:
                os.kill(self._process.pid, number)

    def group_lives(self) -> bool:
        if not self._own_session:
            return False
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def close_pipes(self) -> None:
        """Give up on what still might come out of them: asyncio has no public way to."""
        self._process._transport.close()  # type: ignore[attr-defined]

    async def send(self, data: bytes, *, close: bool) -> None:
        """Write to its standard input. Left open, that input is its lifeline: it ends when we do."""
        stdin = self._process.stdin
        # uvloop closes it as soon as the child has ended, and raises a RuntimeError for what is written then.
        if stdin is None or stdin.is_closing():
            return
        # A child that died early is reported by `wait`, with its reasons; not by a broken pipe here.
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            stdin.write(data)
            async with asyncio.timeout(CHILD_WRITE_TIMEOUT_S):
                await stdin.drain()
        if close:
            stdin.close()


@asynccontextmanager
async def spawn(
    argv: Sequence[str | Path],
    *,
    on_stdout: LineSink,
    on_stderr: LineSink,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    own_session: bool = True,
    pass_fds: Sequence[int] = (),
    line_limit_bytes: int = CHILD_LINE_LIMIT_BYTES,
) -> AsyncIterator[Child]:
    """Start a program, with the descriptors in `pass_fds` open in it under the same numbers.

    With `own_session` off it stays in our group and is killed along with us. Lines of its standard
    output are cut at `line_limit_bytes`; those of its standard error, which go to logs, are made printable.
    """
    process, interruption = await _started(
        [os.fspath(part) for part in argv],
        start_new_session=own_session,
        pass_fds=pass_fds,
        env={**_inherited(), **(env or {})},
        cwd=cwd,
    )
    child = Child(process, own_session=own_session)

    def keep(line: str) -> None:
        line = printable(line)
        child.recent.append(line)
        on_stderr(line)

    assert process.stdout is not None and process.stderr is not None
    readers = [
        asyncio.create_task(
            _read_lines(process.stdout, on_stdout, line_limit_bytes), name=f"stdout of {process.pid}"
        ),
        asyncio.create_task(
            _read_lines(process.stderr, keep, CHILD_LINE_LIMIT_BYTES), name=f"stderr of {process.pid}"
        ),
    ]
    try:
        if interruption is not None:
            raise interruption
        yield child
        # The block may end because the child did: its last words are still in the pipes.
        if process.returncode is not None:
            await asyncio.wait(readers, timeout=CHILD_STOP_GRACE_S)
    finally:
        # A task of its own: cancelling the owner, even twice, must not leave a child behind.
        await uninterrupted(_end(child, process, readers), f"end of {process.pid}")


async def _started(
    argv: list[str], **how: Any
) -> tuple[asyncio.subprocess.Process, asyncio.CancelledError | None]:
    """The process, and the interruption of its owner meanwhile, which is for the caller to raise.

    Cancelled halfway, asyncio takes the child's end from under its own watcher, which complains.
    """
    started: list[asyncio.subprocess.Process] = []

    async def start() -> None:
        pipe = subprocess.PIPE
        started.append(
            await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, **how)
        )

    try:
        await uninterrupted(start(), f"start of {argv[0]}")
    except OSError as error:
        raise MeshError(f"cannot start {argv[0]}: {error.strerror}") from error
    except asyncio.CancelledError as interruption:
        if not started:
            raise
        return started[0], interruption
    return started[0], None


def _inherited() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in WITHHELD}
    # libgomp prefers the count to the policy: whoever has set either knows what they want.
    if _WAIT_POLICY_VARIABLE not in environment:
        environment.setdefault(_SPIN_VARIABLE, SPIN_COUNT)
    return environment


async def _end(child: Child, process: asyncio.subprocess.Process, readers: list[asyncio.Task[None]]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        child.signal_group(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(CHILD_STOP_GRACE_S):
                await process.wait()
                # A driver is gone before those it drives. Killed now, they would leave compilers behind:
                # ninja starts each in a group of its own, which only it can tell to end.
                while child.group_lives():
                    await asyncio.sleep(CHILD_STOP_POLL_S)
    # Always: whatever the child started lives in its session and goes with it.
    child.signal_group(signal.SIGKILL)
    _, late = await asyncio.wait(readers, timeout=CHILD_STOP_GRACE_S)
    for reader in late:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    if late:
        child.close_pipes()
    # After its pipes: asyncio's own loop takes a child for running as long as somebody holds them.
    await process.wait()
    for reader in readers:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            raise error


async def _read_lines(stream: asyncio.StreamReader, sink: LineSink, limit_bytes: int) -> None:
    """Hand over complete lines; a line beyond the limit is cut, never waited for."""
    pending = bytearray()
    while chunk := await stream.read(1 << 16):
        # Each byte is looked at once: a line may be as long as hundreds of chunks.
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                sink(pending.decode(errors="replace").rstrip("\r"))
                pending.clear()
            pending += part[: limit_bytes - len(pending)]
    if pending:
        sink(pending.decode(errors="replace"))


@frozen
class Finished:
    status: int
    output: tuple[str, ...]
    errors: tuple[str, ...]


async def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: LineSink | None = None,
    line_limit_bytes: int = CHILD_LINE_LIMIT_BYTES,
) -> Finished:
    """Run a program to its end. `on_line` sees both outputs as they come."""
    output: list[str] = []

    def collect(line: str) -> None:
        output.append(line)
        if on_line is not None:
            on_line(line)

    def ignore(line: str) -> None:
        if on_line is not None:
            on_line(line)

    async with spawn(
        argv, on_stdout=collect, on_stderr=ignore, env=env, cwd=cwd, line_limit_bytes=line_limit_bytes
    ) as child:
        await child.send(stdin, close=True)
        try:
            async with asyncio.timeout(timeout_s):
                status = await child.wait()
        except TimeoutError:
            name = Path(argv[0]).name
            raise MeshError(f"{name} did not finish within {timeout_s:.0f} s") from None
    return Finished(status=status, output=tuple(output), errors=tuple(child.recent))


def signal_process(process: psutil.Process, number: signal.Signals) -> bool:
    """For a laboratory, which strikes the children of its nodes; whether it was still there.

    psutil notices where the number has passed to another process.
    """
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def die_of(number: int) -> None:
    """End this process by a signal, so that whoever waits for it reads the cause."""
    with suppress(OSError):  # of SIGKILL, which cannot be handled in any other way
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def module(name: str) -> list[str]:
    """The command line of one of our own child modules.

    -P: the folder that the user happens to stand in must not provide modules.
    """
    return [sys.executable, "-P", "-m", name]


def gently(argv: Sequence[str | Path]) -> list[str | Path]:
    """The command line of a program that leaves most of the processor to others, as does what it starts.

    Where Linux shares the processor among sessions, a nice value counts within its own session alone:
    the session needs one, too.
    """
    session = f'{{ echo {NICE} >/proc/self/autogroup; }} 2>/dev/null; exec "$@"'
    return ["nice", "-n", str(NICE), "/bin/sh", "-c", session, "sh", *argv]


def obey(number: signal.Signals) -> None:
    """Let a signal that was caught do to this process what it does by default: stop it, or end it.

    Returns when a stopped process goes on. Main thread only, as all that sets signals.
    """
    before = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, before)
