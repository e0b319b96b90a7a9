"""Several engines over the same workers: against one of them, and against engines that share nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median

import psutil

from bench.plan import Plan
from bench.report import Row, Side, added_row, ratio_row
from bench.stats import Target, at_least
from mesh_llm.bench.client import Client, client
from mesh_llm.bench.company import quiet
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rigs import Rig, ours
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.servers import Server
from mesh_llm.bench.sides import base_plan, complete, over, passive_threads, tokens
from mesh_llm.lab.split import SplitEngine, SplitPlan, split_engine
from mesh_llm.results.samples import Sample

TITLE = "Lanes: several engines over the same workers"

STREAMS, PROMPT = 8, 24
FAR_WORKERS, FAR_S = 3, 0.010
ONE, TWO, THREE, FOUR = "one lane", "two lanes", "three lanes", "four lanes"
APART, FREE = "two engines apart", "with a second"

ENGINES, WORKERS, REST = "engines", "workers", "delay lines and this bench"
_KINDS = {"serve": ENGINES, "worker": WORKERS}
"""By the module of the child."""

Engines = Sequence[Rig]
Speeds = dict[str, list[float]]


@dataclass(slots=True)
class CpuTimes:
    """Seconds of CPU time by kind of process, of all streams of one side."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wall_s: float = 0.0
    tokens: int = 0
    cores: int = 0

    def add(self, begin: dict[str, float], wall_s: float, tokens: int) -> None:
        for kind, end in _cpu_seconds().items():
            self.seconds[kind] += end - begin[kind]
        self.wall_s += wall_s
        self.tokens += tokens
        self.cores = len(_cores())

    @property
    def busy(self) -> float:
        """Cores, on average."""
        return sum(self.seconds.values()) / self.wall_s

    def note(self) -> str:
        each = ", ".join(
            f"{kind} {1000 * self.seconds[kind] / self.tokens:.1f}" for kind in (ENGINES, WORKERS, REST)
        )
        return f"{each}; {self.busy:.2f} of {self.cores} cores busy"


CpuOfSides = dict[str, CpuTimes]


def _cpu_seconds() -> dict[str, float]:
    """Of this process and all below it."""
    seconds: dict[str, float] = defaultdict(float)
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), process.cmdline()
            kind = next(
                (kind for name, kind in _KINDS.items() if f"mesh_llm.engine.children.{name}" in command), REST
            )
            seconds[kind] += times.user + times.system
    return seconds


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def _on_two_cores() -> Iterator[None]:
    """For every child that starts here, where the system knows how."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    all_of_them = _cores()
    # Far from each other: neighbours are often two threads of one core.
    os.sched_setaffinity(0, all_of_them[:: max(1, len(all_of_them) // 2)][:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    base = replace(await base_plan(default_model()), context=512)
    decoded = plan.choose(full=96, quick=32)
    rows: list[Row] = []
    near_cpu: CpuOfSides = defaultdict(CpuTimes)
    far_cpu: CpuOfSides = defaultdict(CpuTimes)
    with passive_threads():
        async with AsyncExitStack() as stack, client() as asker:
            stack.enter_context(_on_two_cores())
            near = over(base, 2).plan
            two, alone = await _lanes(stack, near, 2), await _lanes(stack, near, 1)
            half = replace(base, slots=STREAMS // 2)
            apart = [await stack.enter_async_context(ours(half)) for _ in range(2)]
            sides: dict[str, Engines] = {ONE: alone, TWO: two, APART: apart}
            rounds = _rounds(plan)
            speeds = await _in_turns(asker, sides, decoded, rounds, streams=STREAMS, cpu=near_cpu)
            rows += [
                _row("8 streams, 2 workers, 0 ms", speeds, TWO, APART, at_least(0.85)),
                _row("8 streams, 2 workers, 0 ms", speeds, ONE, APART),
                _row("8 streams, 2 workers, 0 ms", speeds, TWO, ONE),
            ]
        speeds = await _alone_and_beside(near, decoded, plan)
        rows.append(_row("1 stream, 2 workers, 0 ms", speeds, FREE, ONE, at_least(0.98)))
        async with AsyncExitStack() as stack, client() as asker:
            far = over(base, FAR_WORKERS, delay_s=FAR_S).plan
            sides = {
                name: await _lanes(stack, far, count)
                for name, count in ((ONE, 1), (TWO, 2), (THREE, 3), (FOUR, 4))
            }
            speeds = await _in_turns(asker, sides, decoded, _rounds(plan), streams=STREAMS, cpu=far_cpu)
            rows += [
                _row("8 streams, 3 workers, 10 ms", speeds, THREE, ONE, at_least(1.8)),
                _row("8 streams, 3 workers, 10 ms", speeds, TWO, ONE),
                _row("8 streams, 3 workers, 10 ms", speeds, FOUR, ONE),
            ]
        own, weights = await _memory(base)
        rows.append(own)
    return tuple(rows), (
        f"{STREAMS} streams of {decoded} tokens after prompts of {PROMPT}: tokens of all by wall time",
        f"near: {rounds.note()}",
        "1 stream: medians of four for each of several starts of both sides, which differ by where processes "
        "and weights happen to lie",
        "CPU milliseconds for each token of 8 streams:",
        *(f"0 ms, {side}: {times.note()}" for side, times in near_cpu.items()),
        *(f"10 ms, {side}: {times.note()}" for side, times in far_cpu.items()),
        _most(median(speeds[ONE]), far_cpu[ONE]),
        "one thread for each worker and each engine, at 0 ms on two cores, at 10 ms on all that there are; "
        "engines compute embedding and output head themselves",
        "lanes share out the slots: each has as many as it gets streams",
        "memory: PSS of engines on a host with half of the layers; what the first takes and the "
        f"second does not add is shared; the host's weights are {weights / 1e6:.0f} MB",
    )


async def _alone_and_beside(near: SplitPlan, decoded: int, plan: Plan) -> Speeds:
    """One stream with one lane, and with a second one that idles: starts of one side differ by up to 8 %."""
    seen: Speeds = defaultdict(list)
    for _ in plan.rounds(full=6, quick=2, full_s=180.0, quick_s=30.0):
        async with AsyncExitStack() as stack, client() as asker:
            stack.enter_context(_on_two_cores())
            sides: dict[str, Engines] = {
                ONE: await _lanes(stack, near, 1),
                FREE: await _lanes(stack, near, 2),
            }
            sides[FREE] = sides[FREE][:1]
            for name, each in (await _in_turns(asker, sides, decoded, range(4), streams=1)).items():
                seen[name].append(median(each))
    return seen


def _most(one_lane: float, cpu: CpuTimes) -> str:
    """What no number of lanes can exceed: every token crosses all links, and computing takes cores."""
    links_s = (FAR_WORKERS + 1) * FAR_S
    step_s = STREAMS / one_lane
    return (
        "the most that lanes could gain at 10 ms if small batches cost no more: "
        f"{step_s / links_s:.2f} × until only links take time "
        f"({1000 * links_s:.0f} of the {1000 * step_s:.0f} ms of a step of one lane), "
        f"{cpu.cores / cpu.busy:.2f} × until all cores are busy"
    )


def _rounds(plan: Plan) -> Rounds:
    return plan.rounds(full=9, quick=3, full_s=240.0, quick_s=60.0)


async def _lanes(stack: AsyncExitStack, plan: SplitPlan, count: int) -> list[Rig]:
    """So many engines over one set of workers, with no more slots than streams.

    An engine computes slots that are not neighbours one after the other: with some of them empty, a step
    of several streams may take several passes over all workers.
    """
    plan = replace(plan, slots=-(-STREAMS // count))
    engines: list[SplitEngine] = []
    for _ in range(count):
        engines.append(await _one_more(stack, plan, engines))
    return [_rig(engine) for engine in engines]


async def _one_more(stack: AsyncExitStack, plan: SplitPlan, beside: Sequence[SplitEngine]) -> SplitEngine:
    """Over the workers of those that are there."""
    workers = beside[0].workers if beside else ()
    return await stack.enter_async_context(split_engine(plan, workers))


def _rig(engine: SplitEngine) -> Rig:
    report = engine.supervisor.report
    assert report.pid is not None
    return Rig(server=Server(url=engine.url, key=engine.key, pid=report.pid, ready_s=report.ready_s))


async def _in_turns(
    asker: Client,
    sides: dict[str, Engines],
    decoded: int,
    rounds: Iterable[int],
    *,
    streams: int,
    cpu: CpuOfSides | None = None,
) -> Speeds:
    """Every side once unmeasured, then round by round."""
    prompt = await tokens(asker, next(iter(sides.values()))[0], PROMPT + streams)
    seen: Speeds = defaultdict(list)
    for engines in sides.values():
        await _speed(asker, engines, prompt, 4, streams=streams)
    for number in rounds:
        for name, engines in turns(list(sides.items()), number):
            await quiet()
            begin, began = _cpu_seconds(), time.monotonic()
            seen[name].append(await _speed(asker, engines, prompt, decoded, streams=streams))
            if cpu is not None:
                cpu[name].add(begin, time.monotonic() - began, streams * decoded)
    return seen


async def _speed(asker: Client, engines: Engines, prompt: list[int], decoded: int, *, streams: int) -> float:
    """Tokens of all streams by the time that the last of them took."""
    began = time.monotonic()
    await asyncio.gather(
        *(
            complete(asker, engines[index % len(engines)], prompt[index : index + PROMPT], decoded)
            for index in range(streams)
        )
    )
    return streams * decoded / (time.monotonic() - began)


async def _memory(base: SplitPlan) -> tuple[Row, int]:
    """What a second engine adds on a host with layers of its own; and the weights of these layers."""
    half = len(base.facts.layers) // 2
    plan = replace(base, workers=(len(base.facts.layers) - half,), slots=STREAMS // 2)
    engines: list[SplitEngine] = []
    taken: list[int] = []
    async with AsyncExitStack() as stack, client() as asker:
        for _ in range(2):
            engines.append(await _one_more(stack, plan, engines))
            rigs = [_rig(engine) for engine in engines]
            await complete(asker, rigs[-1], await tokens(asker, rigs[-1], PROMPT), 4)
            taken.append(sum(_pss(rig.server.pid) for rig in rigs))
    own = sum(layer.weight_bytes for layer in base.facts.layers[:half]) + base.facts.embedding_bytes
    both, alone = (
        Side(name=name, sample=Sample((size / 1e6,)), unit="MB", digits=0)
        for name, size in (("both lanes", taken[1]), ("the first alone", taken[0]))
    )
    return added_row("memory on the host: what a second lane adds", (both, alone), None, digits=0), own


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


def _row(measure: str, speeds: Speeds, ours: str, theirs: str, target: Target | None = None) -> Row:
    one, other = (
        Side(name=name, sample=Sample(tuple(speeds[name])), unit="tok/s") for name in (ours, theirs)
    )
    return ratio_row(f"{measure}: {ours} of {theirs}", (one, other), target)
