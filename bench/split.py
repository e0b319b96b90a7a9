"""One engine over several workers: ours against stock ggml-rpc and against the engine alone."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bench import meters, servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row, ratio_row
from bench.split_sides import side_of, speeds, write_synthetic
from bench.stats import at_least, at_most, below
from mesh_llm.bench import rigs
from mesh_llm.bench.client import Client, client
from mesh_llm.bench.company import Bystanders, quiet
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rigs import Rig, measured_delay_ms, moved
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.sides import (
    LOCAL,
    SHORT,
    Seen,
    Setup,
    agreement,
    ask_in_turns,
    base_plan,
    complete,
    decode_ms,
    decode_speed,
    over,
    passive_threads,
    prefill_speed,
    running,
    tokens,
)
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.lab.conditions import Passage
from mesh_llm.lab.delay import Line, Lines, delay_lines
from mesh_llm.lab.split import SplitPlan, link_neighbours, worker_spec
from mesh_llm.models.facts import model_facts
from mesh_llm.results.samples import Sample

TITLE = "One engine over workers: ours, stock ggml-rpc, and the engine alone"

DELAY_S, FAR_S = 0.010, 0.050
PREFILL_TOKENS, PREFILL_UBATCH = 2000, 128
_DECODED, _DECODED_FAR = 64, 32

Measured = tuple[tuple[Row, ...], tuple[str, ...]]


async def measure(plan: Plan) -> Measured:
    base = await base_plan(default_model())
    sections = (_near, _far, _prefill, _layouts, _starts)
    rows: list[Row] = []
    notes: list[str] = list(_NOTES)
    with passive_threads(), servers.fresh_home() as folder:
        for section in sections:
            bystanders = Bystanders()
            more, remarks = await section(plan, base, folder)
            rows += more
            notes += [f"{section.__name__[1:]}: {remark}" for remark in remarks]
            notes.append(f"{section.__name__[1:]}: {bystanders.text()}")
    return tuple(rows), tuple(notes)


def _bytes(name: str, values: Sequence[float]) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="B", digits=0)


def _megabytes(name: str, size_bytes: float) -> Side:
    return Side(name=name, sample=Sample((size_bytes / 1e6,)), unit="MB", digits=2)


# -- decode without delay --------------------------------------------------------------------------


async def _near(plan: Plan, base: SplitPlan, folder: Path) -> Measured:
    setups = {
        LOCAL: Setup(plan=base),
        "ours, 2": over(base, 2),
        "ours, 3": over(base, 3),
        "stock, 2": over(base, 2, stock=True),
        "stock, 3": over(base, 3, stock=True),
    }
    rounds = plan.rounds(full=20, quick=6, full_s=180.0, quick_s=60.0)
    async with running(setups) as (sides, asker):
        prompt = await tokens(asker, sides[LOCAL], SHORT)
        seen = await ask_in_turns(asker, sides, prompt, _DECODED, rounds)
    rows = []
    for workers, limit in ((2, 0.95), (3, 0.93)):
        for side, target in (("ours", at_least(limit)), ("stock", None)):
            pair = speeds(seen, decode_speed, f"{side}, {workers}", LOCAL)
            rows.append(ratio_row(f"{side}: decode, {workers} workers, no delay, of local", pair, target))
    return tuple(rows), (rounds.note(), agreement(seen))


# -- decode with delays, bytes, memory -------------------------------------------------------------


async def _far(plan: Plan, base: SplitPlan, folder: Path) -> Measured:
    setups = {
        LOCAL: Setup(plan=base),
        "ours, 3": over(base, 3, delay_s=DELAY_S),
        "stock, 3": over(base, 3, delay_s=DELAY_S, stock=True),
        "ours, 5": over(base, 5, delay_s=DELAY_S),
        "stock, 5": over(base, 5, delay_s=DELAY_S, stock=True),
    }
    rounds = plan.rounds(full=12, quick=4, full_s=180.0, quick_s=70.0)
    async with running(setups) as (sides, asker):
        loaded = {name: await rig.passages() for name, rig in sides.items()}
        prompt = await tokens(asker, sides[LOCAL], SHORT)
        seen = await ask_in_turns(asker, sides, prompt, _DECODED_FAR, rounds)
        delays_ms = {name: measured_delay_ms(await rig.passages()) for name, rig in sides.items()}
        long = await tokens(asker, sides[LOCAL], plan.choose(full=3800, quick=1800))
        hops = {name: await _decode_bytes(asker, sides[name], long) for name in ("ours, 3", "stock, 3")}
        rows = (
            *_weight_rows(sides["ours, 3"], loaded),
            *_waiting_rows(seen, delays_ms),
            ratio_row(
                "decode, 5 workers, 10 ms, of stock",
                speeds(seen, decode_speed, "ours, 5", "stock, 5"),
                at_least(1.5),
            ),
            *_hop_rows(base, hops, len(long)),
            *_memory_rows(base, sides),
        )
        return rows, (
            rounds.note(),
            agreement(seen),
            "measured delays, one way: "
            + ", ".join(f"{name} {delay_ms:.2f} ms" for name, delay_ms in delays_ms.items() if delay_ms),
            *(
                f"bytes per token, {name}, by link and direction: "
                + ", ".join(f"{n:.0f}" for n in hops[name])
                for name in hops
            ),
        )


def _weight_rows(rig: Rig, loaded: dict[str, list[Passage]]) -> Iterator[Row]:
    until_ready = {name: sum(passage.size_bytes for passage in passages) for name, passages in loaded.items()}
    sent = sum(stage.weight_bytes for stage in rig.stages().values())
    ours = _bytes("ours, 3", [sent])
    yield plain_row(
        "weight bytes over links, workers have the file (the engine's own count)", ours, at_most(0)
    )
    yield plain_row(
        "all bytes over links until ready",
        _megabytes("ours, 3", until_ready["ours, 3"]),
        None,
        theirs=_megabytes("stock, 3", until_ready["stock, 3"]),
    )


def _waiting_rows(seen: Seen, delays_ms: dict[str, float]) -> Iterator[Row]:
    for side, target in (("ours, 3", at_most(2.0)), ("stock, 3", None)):
        ways_ms = 4 * delays_ms[side]
        local = [decode_ms(answer) + ways_ms for answer in seen[LOCAL]]
        floor = Side(name=f"local + 4 × {delays_ms[side]:.2f} ms", sample=Sample.of(local), unit="ms")
        pair = side_of(side, seen[side], decode_ms, "ms"), floor
        yield added_row(
            f"{side.split(',')[0]}: decode, 3 workers, 10 ms, above compute + 4 delays", pair, target
        )


async def _decode_bytes(asker: Client, rig: Rig, prompt: list[int]) -> list[float]:
    """Per token, in each direction of each line, with the prompt in the cache."""
    few, many = 8, 40
    await complete(asker, rig, prompt, few, cache=True)
    readings = [await rig.passages()]
    for decoded in (few, many):
        await complete(asker, rig, prompt, decoded, cache=True)
        readings.append(await rig.passages())
    short, long = (moved(*pair) for pair in pairwise(readings))
    return [(late - early) / (many - few) for early, late in zip(short, long, strict=True)]


def _hop_rows(base: SplitPlan, hops: dict[str, list[float]], at: int) -> Iterator[Row]:
    activation = 4 * base.facts.hidden

    mean = {name: sum(directions) / 4 for name, directions in hops.items()}
    yield plain_row(
        f"decode at {at:,} tokens: all bytes per token, over 4 hops",
        _bytes("ours, 3", [mean["ours, 3"]]),
        at_most(activation + 1024),
        theirs=_bytes("stock, 3", [mean["stock, 3"]]),
    )
    worst = {name: max(directions) for name, directions in hops.items()}
    yield plain_row(
        f"decode at {at:,} tokens: bytes per token, the busiest direction of a link",
        _bytes("ours, 3", [worst["ours, 3"]]),
        at_most(activation + 1024),
        theirs=_bytes("stock, 3", [worst["stock, 3"]]),
    )


def _memory_rows(base: SplitPlan, sides: dict[str, Rig]) -> Iterator[Row]:
    files = base.facts.files
    yield plain_row(
        "worker: RSS beside the file's pages, repacked weights and KV (the largest of 3)",
        _beside(base, sides["ours, 3"], "ours, 3"),
        below(120.0),
        theirs=_beside(base, sides["stock, 3"], "stock, 3"),
    )

    names = ("ours, 3", LOCAL)
    held = {name: meters.memory(sides[name].server.pid, files) for name in names}
    read = {name: meters.reads([sides[name].server.pid]) for name in names}
    figures = {
        "peak RSS": [held[name].peak_bytes for name in names],
        "RSS of the model's file": [held[name].model_bytes for name in names],
        "read() since its start, links included": [read[name].call_bytes for name in names],
        "from the disk": [read[name].disk_bytes for name in names],
    }
    for what, values in figures.items():
        ours, theirs = (_megabytes(name, value) for name, value in zip(names, values, strict=True))
        yield plain_row(f"host with all layers elsewhere: {what}", ours, None, theirs=theirs)


def _beside(base: SplitPlan, rig: Rig, name: str) -> Side:
    """An upper bound: compute buffers are left in, since not all of their pages are in memory."""
    found = []
    devices = [
        kinds for device, kinds in meters.buffers(rig.log()).items() if device.startswith(("MESH", "RPC"))
    ]
    for pid, kinds in zip(rig.workers, devices, strict=True):
        memory = meters.memory(pid, base.facts.files)
        found.append(memory.rss_bytes - memory.model_bytes - kinds.get("model", 0) - kinds.get("KV", 0))
    return _megabytes(name, max(found))


# -- prefill ---------------------------------------------------------------------------------------


async def _prefill(plan: Plan, base: SplitPlan, folder: Path) -> Measured:
    base = replace(base, settings=base.settings | {"n_ubatch": PREFILL_UBATCH})
    half = len(base.facts.layers) // 2
    # Stock takes turns with itself: it needs several times as long, and its figure is a ratio of its own.
    setups = {
        LOCAL: Setup(plan=base),
        "ours, 2": over(base, 2),
        "ours, host + 1": Setup(plan=replace(base, workers=(half,))),
    }
    others = {"stock, 1": over(base, 1, stock=True), "stock, 2": over(base, 2, stock=True)}
    rounds = plan.rounds(full=8, quick=4, full_s=200.0, quick_s=75.0)
    stock_rounds = plan.rounds(full=3, quick=1, full_s=120.0, quick_s=1.0)
    async with running(setups | others) as (sides, asker):
        prompt = await tokens(asker, sides[LOCAL], PREFILL_TOKENS)
        seen = await ask_in_turns(asker, {name: sides[name] for name in setups}, prompt, 1, rounds)
        seen |= await ask_in_turns(asker, {name: sides[name] for name in others}, prompt, 1, stock_rounds)
    what = f"prefill, {PREFILL_TOKENS:,} tokens"
    rows = (
        ratio_row(
            f"ours: {what}, 2 workers, of one stage",
            speeds(seen, prefill_speed, "ours, 2", LOCAL),
            at_least(1.7),
        ),
        ratio_row(
            f"ours: {what}, host + 1 worker, of one stage",
            speeds(seen, prefill_speed, "ours, host + 1", LOCAL),
            at_least(1.7),
        ),
        ratio_row(
            f"stock: {what}, 2 workers, of one stage",
            speeds(seen, prefill_speed, "stock, 2", "stock, 1"),
            None,
        ),
    )
    return rows, (
        f"{rounds.note()}; stock, {stock_rounds.note()}",
        agreement(seen),
        f"micro-batches of {PREFILL_UBATCH} tokens on all sides; one stage is the engine alone for ours, one "
        "worker with all layers for stock, whose workers know no special layouts of weights",
    )


# -- layouts of weights ----------------------------------------------------------------------------

_LAYOUT_TOKENS = 512


async def _layouts(plan: Plan, base: SplitPlan, folder: Path) -> Measured:
    rows: list[Row] = []
    notes: list[str] = []
    for quantisation in ("Q4_0", "Q4_K"):
        path = folder / f"{quantisation}.gguf"
        await asyncio.to_thread(write_synthetic, path, quantisation)
        model = replace(base, facts=model_facts(await read_gguf(path)))
        setups = {
            LOCAL: Setup(plan=model),
            "ours, 2": over(model, 2),
            "stock, 2": over(model, 2, stock=True),
        }
        rounds = plan.rounds(full=10, quick=3, full_s=60.0, quick_s=30.0)
        async with running(setups) as (sides, asker):
            prompt = [3 + (37 * n + 11 * n * n) % 500 for n in range(_LAYOUT_TOKENS)]
            seen = await ask_in_turns(asker, sides, prompt, 4, rounds)
        for side in ("ours", "stock"):
            pair = speeds(seen, prefill_speed, f"{side}, 2", LOCAL)
            title = f"{side}: prefill, {quantisation}, {_LAYOUT_TOKENS} tokens in one micro-batch, of local"
            rows.append(ratio_row(title, pair, None))
        notes += [f"{quantisation}, {rounds.note()}", f"{quantisation}, {agreement(seen)}"]
    return tuple(rows), tuple(notes)


# -- starts ----------------------------------------------------------------------------------------


async def _starts(plan: Plan, base: SplitPlan, folder: Path) -> Measured:
    """Over workers that have the weights already, far away; what they read for it."""
    far = over(base, 3, delay_s=FAR_S)
    seen: dict[str, list[float]] = defaultdict(list)
    texts: Seen = defaultdict(list)
    read: list[meters.Reads] = []
    linked: list[int] = []
    rounds = plan.rounds(full=6, quick=3, full_s=120.0, quick_s=60.0)
    async with _far_workers(far.plan, folder) as (workers, peers), client() as asker:
        pids = [worker.child.pid for worker in workers]

        async def start(name: str) -> None:
            setup = {LOCAL: Setup(plan=base), "stock, 3": over(base, 3, delay_s=FAR_S, stock=True)}.get(name)
            async with setup.start() if setup else rigs.ours(far.plan, workers) as rig:
                seen[name].append(rig.server.ready_s)
                prompt = await tokens(asker, rig, SHORT)
                texts[name].append(await complete(asker, rig, prompt, 4))
                if name == "ours, 3":
                    passages = await rig.passages()
                    linked.append(sum(passage.size_bytes for passage in passages[0::2]))

        await start("ours, 3")  # the first one makes the weights resident
        seen.clear()
        linked.clear()
        for number in rounds:
            for name in turns((LOCAL, "ours, 3", "stock, 3"), number):
                await quiet()
                before, between = meters.reads(pids), sum(p.size_bytes for p in await peers.read())
                await start(name)
                if name == "ours, 3":
                    read.append(meters.reads(pids) - before)
                    linked[-1] += sum(p.size_bytes for p in await peers.read()) - between
    return _start_rows(seen, read, linked), (
        rounds.note(),
        agreement(texts),
        "restart: page faults of the 3 workers together that needed no disk (first touches of new memory): "
        + ", ".join(f"{each.minor_faults:,}" for each in read),
    )


def _start_rows(seen: dict[str, list[float]], read: list[meters.Reads], linked: list[int]) -> tuple[Row, ...]:
    ours, local, stock = (
        Side(name=name, sample=Sample.of(seen[name]), unit="s", digits=2)
        for name in ("ours, 3", LOCAL, "stock, 3")
    )
    page = os.sysconf("SC_PAGE_SIZE")
    disk = [each.disk_bytes + page * each.major_faults for each in read]
    calls = [max(0, each.call_bytes - through) for each, through in zip(read, linked, strict=True)]
    return (
        added_row(
            "ours: start until ready, 3 workers, 50 ms, weights resident, above local",
            (ours, local),
            at_most(1.5),
        ),
        added_row("stock: start until ready, 3 workers, 50 ms, above local", (stock, local), None),
        plain_row(
            "restart: workers read from the disk",
            _bytes("3 workers", disk),
            at_most(0),
            worst=True,
        ),
        plain_row(
            "restart: workers read() from files",
            _bytes("3 workers", calls),
            at_most(0),
            worst=True,
        ),
    )


@asynccontextmanager
async def _far_workers(plan: SplitPlan, folder: Path) -> AsyncIterator[tuple[list[WorkerProcess], Lines]]:
    """Workers that outlive the engines over them, with delays between them."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(lend(worker_spec(plan, folder / f"{index}.sock")))
            for index in range(len(plan.workers))
        ]
        lines: list[Line] = []
        await link_neighbours(workers, link=plan.link, lines=lines)
        yield workers, await stack.enter_async_context(delay_lines(lines))


_NOTES = (
    "one thread per process on every side: in decode one stage computes at a time, and more threads than "
    "cores collapse; OMP_WAIT_POLICY=passive for every child",
    "stock: ggml-rpc from the sources of the engine, loaded into the same wheel beside the same CPU library; "
    "as many layers on each worker, the output head on the last one, where llama.cpp puts it; no cache of "
    "weights on disk; ours keeps the head on the host",
    "bytes and delays are counted in the delay lines, on both sides; the delay is one way, on each link, "
    "also between neighbouring workers; without a delay there is no line",
    "prompts are exact token ids, temperature 0, ignore_eos; tok/s and ms per token are the engine's own",
)
