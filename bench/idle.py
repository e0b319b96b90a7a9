"""What a node costs while nobody asks it anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import revision, servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row, ratio_row
from bench.revision import Trees
from bench.stats import at_most, below
from mesh_llm.bench.client import client
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import ENVIRONMENT
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "An idle node beside its engine"

_SETTLE_S = 2.0
"""Loading leaves work behind: freed memory, first-time imports, threads that stop spinning."""
_WINDOWS = 4
_ANSWERS = 20
_STATUS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One process, watched for a while."""

    cpu_percent: tuple[float, ...]
    """Of one core, per window."""
    rss_mb: float
    uss_mb: float
    threads: int
    descriptors: int


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    window_s = plan.choose(full=20, quick=8) / _WINDOWS
    with servers.fresh_home() as home:
        async with servers.node(home) as node, client() as asker:
            pids = node.pid, (await _status(home))["engine"]["pid"]
            fresh = await _watch(pids, window_s)
            body = {"prompt": "The sea", "n_predict": 8, "temperature": 0}
            for _ in range(_ANSWERS):
                await asker.ask(node, "/completion", body)
            used = await _watch(pids, window_s)
    rows = (*_rows("fresh", *fresh), *_rows(f"after {_ANSWERS} answers", *used))
    return rows, (
        f"CPU: share of one core in {_WINDOWS} windows of {window_s:g} s, judged by the worst; they begin "
        f"{_SETTLE_S:g} s after the node says that it serves, and after its last answer",
        "RSS counts shared library pages, USS only what would be free again if the process ended; "
        "MB are 10^6 bytes",
        _handles("fresh", *fresh),
        _handles(f"after {_ANSWERS} answers", *used),
    )


async def compare(plan: Plan, trees: Trees) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """A node of each commit, one after the other."""
    await trees.then.build()
    window_s = plan.choose(full=12, quick=8) / _WINDOWS
    seen: dict[str, list[Usage]] = {tree.name: [] for tree in trees.both}
    rounds = plan.rounds(full=6, quick=2, full_s=300.0, quick_s=90.0)
    for number in rounds:
        for tree in turns(trees.both, number):
            with servers.fresh_home() as home:
                async with servers.node(home, tree=tree) as node:
                    status = await tree.run("status", "--json", "--home", str(home))
                    told = json.loads("\n".join(status.output))
                    usage, _ = await _watch((node.pid, told["engine"]["pid"]), window_s)
                    seen[tree.name].append(usage)

    def sides(figure: Callable[[Usage], float], unit: str, digits: int) -> tuple[Side, Side]:
        figures = {name: [figure(usage) for usage in usages] for name, usages in seen.items()}
        return revision.sides(figures, unit, digits=digits)

    cpu = sides(lambda usage: Sample(usage.cpu_percent).median, "%", 2)
    rows = (
        added_row("CPU of a fresh node, more than then", cpu, at_most(0.2)),
        ratio_row("USS of a fresh node", sides(lambda usage: usage.uss_mb, "MB", 1), at_most(1.05)),
    )
    return rows, (
        rounds.note(),
        f"CPU: share of one core, the median of {_WINDOWS} windows of {window_s:g} s; they begin "
        f"{_SETTLE_S:g} s after the node says that it serves",
    )


def _handles(when: str, node: Usage, engine: Usage) -> str:
    return (
        f"{when}: node {node.threads} threads, {node.descriptors} descriptors; "
        f"engine {engine.threads} threads, {engine.descriptors} descriptors"
    )


async def _status(home: Path) -> dict[str, Any]:
    argv = [str(servers.command()), "status", "--json", "--home", str(home)]
    finished = await run(argv, timeout_s=_STATUS_S, env=ENVIRONMENT)
    if finished.status != 0:
        raise MeshError(f"mesh-llm status ended with {finished.status}")
    document: dict[str, Any] = json.loads("\n".join(finished.output))
    return document


async def _watch(pids: tuple[int, int], window_s: float) -> tuple[Usage, Usage]:
    """Both processes through the same windows."""
    await asyncio.sleep(_SETTLE_S)
    processes = [psutil.Process(pid) for pid in pids]
    cpu: list[list[float]] = [[] for _ in processes]
    for _ in range(_WINDOWS):
        before = [_cpu_s(process) for process in processes]
        started = time.perf_counter()
        await asyncio.sleep(window_s)
        took_s = time.perf_counter() - started
        for shares, process, early in zip(cpu, processes, before, strict=True):
            shares.append(100 * (_cpu_s(process) - early) / took_s)
    node, engine = (_usage(process, shares) for process, shares in zip(processes, cpu, strict=True))
    return node, engine


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _usage(process: psutil.Process, cpu_percent: list[float]) -> Usage:
    memory = process.memory_full_info()
    return Usage(
        cpu_percent=tuple(cpu_percent),
        rss_mb=memory.rss / 1e6,
        uss_mb=memory.uss / 1e6,
        threads=process.num_threads(),
        descriptors=process.num_fds(),
    )


def _rows(when: str, node: Usage, engine: Usage) -> tuple[Row, ...]:
    def side(name: str, values: tuple[float, ...], unit: str, digits: int) -> Side:
        return Side(name=name, sample=Sample(values), unit=unit, digits=digits)

    return (
        plain_row(
            f"CPU, {when}",
            side("node", node.cpu_percent, "%", 2),
            below(1.0),
            theirs=side("engine", engine.cpu_percent, "%", 2),
            worst=True,
        ),
        plain_row(
            f"RSS, {when}",
            side("node", (node.rss_mb,), "MB", 1),
            below(120.0),
            theirs=side("engine", (engine.rss_mb,), "MB", 1),
        ),
        plain_row(
            f"USS, {when}",
            side("node", (node.uss_mb,), "MB", 1),
            None,
            theirs=side("engine", (engine.uss_mb,), "MB", 1),
        ),
    )
