"""Children of `engine/process.py`: however the block ends, nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from mesh_llm.engine import process
from mesh_llm.engine.process import CHILD_KEPT_LINES, CHILD_LINE_LIMIT_BYTES, Child, run, spawn
from mesh_llm.errors import MeshError
from tests.support.command import MARKER, marked
from tests.support.waiting import until

GRACE_S = 0.3
WAIT_S = 20.0
"""For what takes a moment, on a machine that is busy with something else."""

PARENT_OF_A_SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"])
time.sleep(600)
"""
PARENT_THAT_LEAVES = """
from subprocess import DEVNULL, Popen
Popen(["sleep", "600"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
time.sleep(600)
"""

DRIVER_OF_A_DRIVER = """
import subprocess, sys, time
inner = '''
import os, signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "600"], process_group=0)
def end(number, frame):
    time.sleep(0.2)
    os.killpg(worker.pid, number)
    worker.wait()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print("here", flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", inner])
time.sleep(600)
"""
"""As CMake runs ninja, and ninja a compiler: it is the one in the middle that ends the last one."""
PARENT_OF_AN_ESCAPEE = """
import subprocess, time
subprocess.Popen(["sleep", "3"], start_new_session=True)
print("here", flush=True)
time.sleep(600)
"""


def nothing(line: str) -> None:
    pass


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that a test starts carries a marker; none of it may be left."""
    value = secrets.token_hex(8)
    monkeypatch.setenv(MARKER, value)
    yield value
    assert [found for found in marked(value) if found.pid != os.getpid()] == []


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD_STOP_GRACE_S", GRACE_S)


def alive(family: str) -> int:
    return len(marked(family))


class Heard:
    """Lines of a child, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._came.set()

    async def first(self) -> str:
        async with asyncio.timeout(WAIT_S):
            await self._came.wait()
        return self.lines[0]


# -- the end of a child ---------------------------------------------------------------------------


async def test_grandchildren_end_with_the_block(family: str) -> None:
    heard = Heard()
    async with spawn(python(PARENT_OF_A_SLEEPER), on_stdout=heard, on_stderr=nothing):
        assert await heard.first() == "here"
        assert alive(family) == 2

    assert alive(family) == 0


async def test_grandchildren_that_outlive_their_parent_end_too(family: str) -> None:
    finished = await run(python(PARENT_THAT_LEAVES), timeout_s=WAIT_S)

    assert finished.status == 0
    until(lambda: alive(family) == 0, within_s=WAIT_S, what="the grandchild is gone")


async def test_a_child_that_ignores_the_request_is_killed_after_the_grace(short_grace: None) -> None:
    heard = Heard()
    async with spawn(python(STUBBORN), on_stdout=heard, on_stderr=nothing) as child:
        await heard.first()
        began = time.monotonic()

    assert await child.wait() == -signal.SIGKILL
    assert GRACE_S <= time.monotonic() - began < GRACE_S + WAIT_S


async def test_a_child_that_obeys_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD_STOP_GRACE_S", 3 * WAIT_S)
    heard = Heard()
    began = time.monotonic()
    async with spawn(
        python("import time; print('here', flush=True); time.sleep(600)"), on_stdout=heard, on_stderr=nothing
    ) as child:
        await heard.first()

    assert await child.wait() == -signal.SIGTERM
    assert time.monotonic() - began < 2 * WAIT_S


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
"""That of commands, and that of nodes: they know in different ways that a child has ended."""


@LOOPS
def test_who_has_children_in_other_groups_is_given_time_to_end_them(
    family: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def own() -> None:
        heard = Heard()
        async with spawn(python(DRIVER_OF_A_DRIVER), on_stdout=heard, on_stderr=nothing):
            assert await heard.first() == "here"
            # The last one may be about to become a program of its own.
            async with asyncio.timeout(WAIT_S):
                while alive(family) != 3:
                    await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(own())
    assert alive(family) == 0


@LOOPS
def test_pipes_that_an_escapee_keeps_open_are_closed_here(
    family: str, short_grace: None, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def own() -> None:
        heard = Heard()
        async with spawn(python(PARENT_OF_AN_ESCAPEE), on_stdout=heard, on_stderr=nothing):
            await heard.first()
        assert alive(family) == 1

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(own())
    until(lambda: alive(family) == 0, within_s=WAIT_S, what="it has ended by itself")


async def test_an_error_in_the_block_ends_the_child(family: str) -> None:
    with pytest.raises(KeyError):
        async with spawn(python("import time; time.sleep(600)"), on_stdout=nothing, on_stderr=nothing):
            raise KeyError

    assert alive(family) == 0


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelling_leaves_nothing(family: str, short_grace: None, times: int) -> None:
    heard = Heard()
    children: list[Child] = []

    async def own() -> None:
        async with spawn(python(STUBBORN), on_stdout=heard, on_stderr=nothing) as child:
            children.append(child)
            await child.wait()

    task = asyncio.create_task(own())
    await heard.first()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task

    assert alive(family) == 0
    assert await children[0].wait() == -signal.SIGKILL


async def test_cancelling_while_it_starts_leaves_nothing(family: str) -> None:
    for steps in range(12):
        task = asyncio.create_task(run(["sleep", "600"], timeout_s=WAIT_S))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    until(lambda: alive(family) == 0, within_s=WAIT_S, what="all of them are gone")


async def test_a_start_is_not_cancelled_halfway(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start, begun = asyncio.create_subprocess_exec, asyncio.Event()

    async def start_slowly(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        begun.set()
        await asyncio.sleep(0.05)
        started.append(await start(*argv, **options))
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    task = asyncio.create_task(run(["sleep", "600"], timeout_s=WAIT_S))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert [process.returncode for process in started] == [-signal.SIGTERM]
    assert alive(family) == 0


async def test_without_a_session_of_its_own_it_stays_in_our_group() -> None:
    heard = Heard()
    code = "import os, time; print(os.getpgid(0), flush=True); time.sleep(600)"
    async with spawn(python(code), on_stdout=heard, on_stderr=nothing, own_session=False):
        assert await heard.first() == str(os.getpgid(0))


# -- output ---------------------------------------------------------------------------------------


async def test_both_outputs_are_read(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('out\\n' * 50_000); sys.stderr.write('err\\n' * 50_000)"
    lines: list[str] = []

    finished = await run(python(code), timeout_s=WAIT_S, on_line=lines.append)

    assert finished.status == 0
    assert finished.output == ("out",) * 50_000
    assert finished.errors == ("err",) * CHILD_KEPT_LINES
    assert sorted(lines) == ["err"] * 50_000 + ["out"] * 50_000


async def test_last_words_arrive_although_the_child_is_dead() -> None:
    code = "import os; os.write(1, b'first\\nlast'); os.write(2, b'why'); os.kill(os.getpid(), 6)"

    finished = await run(python(code), timeout_s=WAIT_S)

    assert finished.status == -signal.SIGABRT
    assert finished.output == ("first", "last")
    assert finished.errors == ("why",)


async def test_a_long_line_takes_no_longer_than_short_ones() -> None:
    size = 64 << 20
    stream = asyncio.StreamReader()
    stream.feed_data(b"x" * size + b"\nshort\n")
    stream.feed_eof()
    lines: list[str] = []
    before_s = time.process_time()

    await process._read_lines(stream, lines.append, size)

    assert [len(line) for line in lines] == [size, 5]
    # A tenth of a second; to copy what has come so far with every chunk would take twenty of them.
    assert time.process_time() - before_s < 5


async def test_a_long_line_is_cut_and_the_next_one_whole() -> None:
    code = "import sys; sys.stdout.write('x' * 1_000_000 + '\\nshort\\n')"

    finished = await run(python(code), timeout_s=WAIT_S)

    assert finished.output == ("x" * CHILD_LINE_LIMIT_BYTES, "short")


async def test_bytes_that_are_no_text_do_no_harm() -> None:
    finished = await run(python(r"import os; os.write(1, b'\xff\xfe ok\r\n')"), timeout_s=WAIT_S)

    assert finished.output == ("�� ok",)


async def test_lines_for_logs_are_printable() -> None:
    code = "import sys; sys.stderr.buffer.write(b'one\\x1b[2J\\rtwo\\tthree\\n')"
    finished = await run([sys.executable, "-c", code], timeout_s=30)
    assert finished.errors == ("one?[2J?two three",)


async def test_input_arrives_and_ends() -> None:
    finished = await run(
        python("print(len(input()), end='')"), timeout_s=WAIT_S, stdin=b"x" * 200_000 + b"\n"
    )

    assert finished.output == ("200000",)


async def test_a_child_that_reads_no_input_is_told_by_its_status() -> None:
    finished = await run(python("raise SystemExit(7)"), timeout_s=WAIT_S, stdin=b"x" * 1_000_000)

    assert finished.status == 7


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, f"{process.SPIN_COUNT} None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "active"}, "None active"),
    ],
    ids=["nothing", "a count", "a policy"],
)
async def test_waiting_threads_soon_sleep_unless_somebody_has_set_how_they_wait(
    given: dict[str, str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    finished = await run(
        python("import os; e = os.environ.get; print(e('GOMP_SPINCOUNT'), e('OMP_WAIT_POLICY'))"),
        timeout_s=WAIT_S,
    )

    assert finished.output == (seen,)


# -- what goes wrong ------------------------------------------------------------------------------


async def test_time_is_bounded(family: str) -> None:
    began = time.monotonic()

    with pytest.raises(MeshError, match=r"^sleep did not finish within 0 s$"):
        await run(["sleep", "600"], timeout_s=0.2)

    assert time.monotonic() - began < WAIT_S
    assert alive(family) == 0


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(MeshError, match=r"^cannot start /no/such/program: No such file or directory$"):
        await run(["/no/such/program"], timeout_s=1)


async def test_a_sink_that_fails_is_not_lost(family: str) -> None:
    def fail(line: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(python("print('here')"), timeout_s=WAIT_S, on_line=fail)

    assert alive(family) == 0
