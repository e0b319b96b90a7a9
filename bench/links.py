"""Data links over QUIC: a socket spliced to a stream on both sides, against the stream alone."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench import servers
from bench.links_programs import ECHO, PING, PULL, PUSH, Driver
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row, ratio_row
from bench.split_sides import speeds
from bench.stats import at_least, at_most
from mesh_llm.bench.company import Bystanders, quiet
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import ENVIRONMENT, following
from mesh_llm.bench.sides import (
    LOCAL,
    SHORT,
    Setup,
    agreement,
    ask_in_turns,
    base_plan,
    decode_speed,
    over,
    passive_threads,
    running,
    tokens,
)
from mesh_llm.engine import build
from mesh_llm.engine.process import run, spawn
from mesh_llm.errors import MeshError
from mesh_llm.lab.quic import QuicLine, QuicLines, Splicing, quic_lines
from mesh_llm.results.samples import Sample

TITLE = "Data links over QUIC: spliced, and bare"

BARE, NATIVE, LOOP = "bare iroh", "native", "event loop"
BUSY = ", loops busy"
_BUSY_S = 0.003
_MESSAGE_BYTES = 2500
"""One token's activation of a small model, with its header."""
_MESSAGES, _WARM_UP = 400, 100
_CHUNK_BYTES, _CHUNKS = 256 << 10, 400
_ANSWER_S = 60.0
_BUILD_S = 60.0
_DECODED = 64
_QUIC_LINKS, _LOOP_LINKS = "quic", "quic by the loop"

Measured = tuple[tuple[Row, ...], tuple[str, ...]]


async def measure(plan: Plan) -> Measured:
    library = await _library()
    rows: list[Row] = []
    notes: list[str] = []
    with passive_threads(), servers.fresh_home() as folder:
        driver = await _driver(folder)
        for name, part in (("links", _links), ("decode", _decode)):
            bystanders = Bystanders()
            more, remarks = await part(plan, library, driver)
            rows += more
            notes += [f"{name}: {remark}" for remark in remarks]
            notes.append(f"{name}: others used {bystanders.cores():.1f} cores meanwhile")
    return tuple(rows), (*notes, *_NOTES)


_NOTES = (
    f"{BARE}: two processes, one stream that native code writes and reads through the same C calls",
    "spliced: as many processes and streams, and a socket on each side with native code at its other end",
    f"added per hop: half of what a round trip of {_MESSAGE_BYTES} bytes takes longer than over {BARE}",
    f"throughput: {_CHUNKS * _CHUNK_BYTES / 1e6:.0f} MB one way, until a byte has come back",
    f"loops busy: both nodes' event loops are held up for {1000 * _BUSY_S:g} of every 10 ms",
    "CPU time: of both node processes together, for a message one way; for bare iroh with the driver's own",
)


# -- the ways ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    seconds: list[float]
    cpu_s: float


class Way(Protocol):
    async def drive(self, whats: tuple[int, int], size: int, rounds: int) -> Round:
        """What the near end does, and the far end at the same time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SplicedWay:
    near: socket.socket
    far: socket.socket
    lines: QuicLines
    driver: Driver

    async def drive(self, whats: tuple[int, int], size: int, rounds: int) -> Round:
        before = await self.lines.cpu_s()
        seconds, _ = await asyncio.gather(
            *(
                asyncio.to_thread(self.driver.socket, end.fileno(), what, size, rounds)
                for end, what in zip((self.near, self.far), whats, strict=True)
            )
        )
        return Round(seconds=seconds, cpu_s=await self.lines.cpu_s() - before)


@asynccontextmanager
async def _spliced(driver: Driver, splicing: Splicing) -> AsyncIterator[Way]:
    near, near_link = socket.socketpair()
    far, far_link = socket.socketpair()
    with near, far:
        async with quic_lines([QuicLine(one=near_link, other=far_link)], splicing) as lines:
            yield SplicedWay(near=near, far=far, lines=lines, driver=driver)


class BareWay:
    def __init__(self, near: _Program, far: _Program) -> None:
        self._ends = near, far

    async def drive(self, whats: tuple[int, int], size: int, rounds: int) -> Round:
        near, far = await asyncio.gather(
            *(
                end.ask({"what": what, "size": size, "rounds": rounds})
                for end, what in zip(self._ends, whats, strict=True)
            )
        )
        return Round(seconds=near["seconds"], cpu_s=near["cpu_s"] + far["cpu_s"])


@asynccontextmanager
async def _bare(driver: Path, library: Path) -> AsyncIterator[Way]:
    request = {"driver": str(driver), "library": str(library)}
    async with _program() as far, _program() as near:
        met = await far.ask({**request, "ticket": None})
        await near.ask({**request, "ticket": met["ticket"]})
        yield BareWay(near, far)


class _Program:
    """A line in, a line out."""

    def __init__(self) -> None:
        self.lines = asyncio.Queue[str](maxsize=8)
        self.send: Any = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self.send(json.dumps(request).encode() + b"\n", close=False)
                answer: dict[str, Any] = json.loads(await self.lines.get())
                return answer
        except TimeoutError:
            raise MeshError("an end of a bare connection says nothing") from None


@asynccontextmanager
async def _program() -> AsyncIterator[_Program]:
    program = _Program()
    argv = following([sys.executable, "-P", "-m", "bench.links_programs"])
    root = str(Path(__file__).parents[1])
    async with spawn(
        argv,
        on_stdout=program.lines.put_nowait,
        on_stderr=lambda _: None,
        env={**ENVIRONMENT, "PYTHONPATH": root},
    ) as child:
        program.send = child.send
        yield program


async def _library() -> Path:
    built = await build.ensure((build.SPLICE,), lambda _: None)
    for error in built.missing.values():
        raise error
    return built.libraries[build.SPLICE]


async def _driver(folder: Path) -> Path:
    made, source = folder / "driver.so", Path(__file__).with_name("links_driver.cpp")
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w")
    finished = await run([build.compiler() or "c++", *flags, source, "-o", made], timeout_s=_BUILD_S)
    if finished.status != 0:
        raise MeshError(f"the links bench does not compile: {' / '.join(finished.errors[-3:])}")
    return made


# -- latency, throughput, CPU ------------------------------------------------------------------------


async def _links(plan: Plan, library: Path, driver_path: Path) -> Measured:
    hop_ms: dict[str, list[float]] = defaultdict(list)
    cpu_us: dict[str, list[float]] = defaultdict(list)
    rate: dict[str, list[float]] = defaultdict(list)
    driver = Driver(driver_path)
    async with AsyncExitStack() as stack:
        ways: dict[str, Way] = {BARE: await stack.enter_async_context(_bare(driver_path, library))}
        for name, splicing in (
            (NATIVE, Splicing(library=library)),
            (LOOP, Splicing()),
        ):
            ways[name] = await stack.enter_async_context(_spliced(driver, splicing))
        for way in ways.values():
            await way.drive((PING, ECHO), _MESSAGE_BYTES, _WARM_UP)
        rounds = plan.rounds(full=30, quick=8, full_s=120.0, quick_s=60.0)
        for number in rounds:
            for name, way in turns(list(ways.items()), number):
                await quiet()
                seen = await way.drive((PING, ECHO), _MESSAGE_BYTES, _MESSAGES)
                hop_ms[name].append(1000 * statistics.median(seen.seconds) / 2)
                cpu_us[name].append(1e6 * seen.cpu_s / (2 * _MESSAGES))
                pushed = await way.drive((PUSH, PULL), _CHUNK_BYTES, _CHUNKS)
                rate[name].append(_CHUNKS * _CHUNK_BYTES / 1e6 / pushed.seconds[0])
    busy_rows, busy_note = await _busy(plan, library, driver)

    def pair(values: dict[str, list[float]], ours: str, unit: str, digits: int) -> tuple[Side, Side]:
        return _side(values, ours, unit, digits), _side(values, BARE, unit, digits)

    rows = (
        ratio_row(f"{NATIVE}: throughput, of bare", pair(rate, NATIVE, "MB/s", 0), at_least(0.6)),
        ratio_row(f"{LOOP}: throughput, of bare", pair(rate, LOOP, "MB/s", 0), None),
        added_row(f"{NATIVE}: added per hop", pair(hop_ms, NATIVE, "ms", 3), at_most(0.8), digits=3),
        added_row(f"{LOOP}: added per hop", pair(hop_ms, LOOP, "ms", 3), None, digits=3),
        *busy_rows,
        *(
            plain_row(
                f"{name}: CPU time of a message",
                _side(cpu_us, name, "µs", 0),
                None,
                theirs=_side(cpu_us, BARE, "µs", 0),
            )
            for name in (NATIVE, LOOP)
        ),
    )
    return rows, (rounds.note(), busy_note)


async def _busy(plan: Plan, library: Path, driver: Driver) -> tuple[tuple[Row, ...], str]:
    """One hop while the nodes' loops have other work: the median, and what one message in twenty exceeds."""
    hop_ms: dict[str, list[float]] = defaultdict(list)
    late_ms: dict[str, list[float]] = defaultdict(list)
    rounds = plan.rounds(full=12, quick=4, full_s=50.0, quick_s=30.0)
    for number in rounds:
        for name, splicing in turns([(NATIVE, Splicing(library=library)), (LOOP, Splicing())], number):
            # One pair at a time: idle ones would use the cores that are measured.
            async with _spliced(driver, replace(splicing, busy_s=_BUSY_S)) as way:
                await way.drive((PING, ECHO), _MESSAGE_BYTES, _WARM_UP)
                seen = sorted((await way.drive((PING, ECHO), _MESSAGE_BYTES, _MESSAGES)).seconds)
                hop_ms[name].append(1000 * statistics.median(seen) / 2)
                late_ms[name].append(1000 * seen[len(seen) * 19 // 20] / 2)
    rows = tuple(
        plain_row(
            f"one hop{BUSY}, {what}",
            _side(values, NATIVE, "ms", 3),
            None,
            theirs=_side(values, LOOP, "ms", 3),
        )
        for what, values in (("median", hop_ms), ("19 of 20 within", late_ms))
    )
    return rows, f"loops busy: {rounds.note()}"


def _side(values: dict[str, list[float]], name: str, unit: str, digits: int) -> Side:
    return Side(name=name, sample=Sample.of(values[name]), unit=unit, digits=digits)


# -- decode over links -------------------------------------------------------------------------------


async def _decode(plan: Plan, library: Path, _: Path) -> Measured:
    base = over(await base_plan(default_model()), 2).plan
    setups = {
        LOCAL: Setup(plan=base),
        _QUIC_LINKS: Setup(plan=replace(base, splicing=Splicing(library=library))),
        _LOOP_LINKS: Setup(plan=replace(base, splicing=Splicing())),
    }
    rounds = plan.rounds(full=24, quick=6, full_s=120.0, quick_s=60.0)
    async with running(setups) as (sides, asker):
        prompt = await tokens(asker, sides[LOCAL], SHORT)
        seen = await ask_in_turns(asker, sides, prompt, _DECODED, rounds)
    return (
        ratio_row(
            "decode, 2 workers, quic links, of local links",
            speeds(seen, decode_speed, _QUIC_LINKS, LOCAL),
            at_least(0.8),
        ),
        ratio_row(
            "decode, 2 workers, quic links by the loop, of local links",
            speeds(seen, decode_speed, _LOOP_LINKS, LOCAL),
            None,
        ),
    ), (rounds.note(), agreement(seen))
