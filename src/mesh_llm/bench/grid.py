"""Node counts by latencies on one machine: ours, ours with drafts, stock ggml-rpc, and the engine alone.

A node is the host or a worker: N nodes are the host and N − 1 workers, and the layers are spread evenly over
all of them. Every side has the same layers, threads, kernels and delay lines, and is asked in the same round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from enum import StrEnum
from pathlib import Path

import psutil

from mesh_llm.bench import rigs, texts
from mesh_llm.bench.client import Client
from mesh_llm.bench.company import Bystanders
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.rounds import Rounds
from mesh_llm.bench.sides import (
    Seen,
    Setup,
    ask_in_turns,
    complete,
    decode_ms,
    passive_threads,
    plan_alone,
    running,
    shares,
)
from mesh_llm.defaults import DRAFT_MAX, GUESS_TEXT_MAX
from mesh_llm.engine import build
from mesh_llm.engine.spec import DraftSpec
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.split import SplitPlan
from mesh_llm.types import Progress, ProgressSink

NODES_LIMIT = 9
CONTEXT = 2048
CELL_S, QUICK_CELL_S = 180.0, 30.0
"""For the rounds of one cell; on a machine too busy for all of them the rest is left out."""
_START_S = 5.0
"""To start one side of a cell, as a guess: what is said beforehand is no more than that."""
_ROOM = 1.5
"""Memory of a side as a multiple of the model's file: repacked weights, KV caches, compute buffers."""

Tell = Callable[[str], None]


class GridSide(StrEnum):
    UNSPLIT = "unsplit"
    OURS = "ours"
    DRAFTS = "ours + drafts"
    STOCK = "stock ggml-rpc"
    COMPUTE = "stock, compute delayed"
    """As the published figures were measured: only commands that compute take their time on a link."""

    @property
    def is_stock(self) -> bool:
        return self in (GridSide.STOCK, GridSide.COMPUTE)


SPLIT_SIDES = (GridSide.OURS, GridSide.DRAFTS, GridSide.STOCK, GridSide.COMPUTE)


@frozen
class GridSpec:
    model: Path
    nodes: tuple[int, ...] = (3, 4, 5)
    latencies_s: tuple[float, ...] = (0.0, 0.005, 0.010, 0.020, 0.030)
    """One way, on every link."""
    sides: tuple[GridSide, ...] = SPLIT_SIDES
    draft: Path | None = None
    """A draft model for `ours + drafts`, which otherwise guesses from the text alone."""
    jitter_s: float = 0.0
    """At most as much as the latency of the cell."""
    bytes_s: float | None = None
    loss: float = 0.0
    rounds: int = 5
    tokens: int = 48
    cell_s: float = CELL_S

    def __post_init__(self) -> None:
        wrong = [count for count in self.nodes if not 2 <= count <= NODES_LIMIT]
        if wrong or not self.nodes:
            raise UsageError(f"--nodes: give counts between 2 and {NODES_LIMIT}", hint="for example 3,4,5")
        if not self.latencies_s:
            raise UsageError("--latency: give at least one", hint="for example 0,10")
        for latency_s in self.latencies_s:
            self.link(latency_s)  # raises with a sentence

    def link(self, latency_s: float) -> Conditions:
        return Conditions(
            delay_s=latency_s,
            jitter_s=min(self.jitter_s, latency_s),
            bytes_s=self.bytes_s,
            loss=self.loss,
        )

    @property
    def cells(self) -> tuple[Cell, ...]:
        counts, delays = sorted(set(self.nodes)), sorted(set(self.latencies_s))
        return tuple(Cell(nodes=nodes, latency_s=latency_s) for nodes in counts for latency_s in delays)


@frozen
class Cell:
    nodes: int
    latency_s: float

    def hops(self, side: GridSide) -> int:
        """Links that a token crosses: ours pushes from worker to worker, stock goes by the host each time."""
        if side is GridSide.COMPUTE:
            return self.nodes - 1
        return 2 * (self.nodes - 1) if side is GridSide.STOCK else self.nodes


@frozen
class CellFound:
    seen: Seen
    """By side; the engine alone is among them."""
    ready_s: dict[str, float]
    delay_ms: dict[str, float]
    """As measured in the lines, one way."""
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    """Over all links until it was ready; of those sides alone that have lines, which count them."""


@frozen
class GridFound:
    cells: dict[Cell, CellFound] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    plan: SplitPlan


async def measure(spec: GridSpec, *, tell: Tell, progress: ProgressSink) -> GridFound:
    """`tell` gets a sentence for the person who waits, `progress` each step."""
    built = await build.ensure((*build.STANDARD, "rpc"), progress)
    sides, notes = list(spec.sides), list(_NOTES)
    for name, error in built.missing.items():
        if name != "rpc":
            raise error
        sides = [side for side in sides if not side.is_stock]
        notes.append(f"stock ggml-rpc is left out: {error.message}")
        tell(notes[-1])
    alone = replace(await plan_alone(spec.model, built.libraries), context=CONTEXT)
    if max(spec.nodes) > len(alone.facts.layers):
        raise UsageError(
            f"--nodes {max(spec.nodes)}: the model has only {len(alone.facts.layers)} layers to spread"
        )
    found: dict[Cell, CellFound] = {}
    company = Bystanders()
    with passive_threads():
        async with running({GridSide.UNSPLIT: Setup(plan=alone)}) as (started, asker):
            unsplit = started[GridSide.UNSPLIT]
            prompt = await _prompt(asker, unsplit)
            first = await complete(asker, unsplit, prompt, spec.tokens)
            tell(_duration(spec, sides, decode_ms(first)))
            for number, cell in enumerate(spec.cells):
                what = f"{cell.nodes} nodes, {1000 * cell.latency_s:g} ms"
                progress(Progress(what=what, done=number, total=len(spec.cells)))
                setups = {side: setup(side, alone, cell, spec) for side in sides}
                if spec.link(cell.latency_s).is_open:
                    setups.pop(GridSide.COMPUTE, None)  # nothing is slowed down: it is stock
                found[cell] = await _measure_cell(spec, setups, prompt, unsplit)
    progress(Progress(what="grid", done=len(spec.cells), total=len(spec.cells)))
    notes += [_agreement(found), company.text()]
    return GridFound(cells=found, notes=tuple(notes), plan=alone)


def setup(side: GridSide, alone: SplitPlan, cell: Cell, spec: GridSpec) -> Setup:
    """Layers spread evenly over the host, which has the first, and its workers."""
    _, *workers = shares(len(alone.facts.layers), cell.nodes)
    plan = replace(alone, workers=tuple(workers), conditions=spec.link(cell.latency_s))
    if side is GridSide.DRAFTS:
        model = str(spec.draft) if spec.draft else None
        depth = DRAFT_MAX if model else 0
        plan = replace(plan, draft=DraftSpec(text_depth=GUESS_TEXT_MAX, model=model, model_depth=depth))
    return Setup(plan=plan, stock=side.is_stock, only_compute=side is GridSide.COMPUTE)


async def _measure_cell(
    spec: GridSpec, setups: dict[GridSide, Setup], prompt: list[int], unsplit: Rig
) -> CellFound:
    seen: Seen = defaultdict(list)
    ready_s: dict[str, float] = {}
    delay_ms: dict[str, float] = {}
    loaded_bytes: dict[str, int] = {}
    for group in groups(list(setups), size_bytes=spec.model.stat().st_size, free_bytes=_free_bytes()):
        async with running({side: setups[side] for side in group}) as (started, asker):
            for name, rig in started.items():
                if passed := await rig.passages():
                    loaded_bytes[name] = sum(way.size_bytes for way in passed)
            rounds = Rounds(wanted=spec.rounds, budget_s=spec.cell_s)
            asked = {GridSide.UNSPLIT: unsplit, **started}
            for name, answers in (await ask_in_turns(asker, asked, prompt, spec.tokens, rounds)).items():
                seen[name] += answers
            for name, rig in started.items():
                ready_s[name] = rig.server.ready_s
                delay_ms[name] = rigs.measured_delay_ms(await rig.passages())
    return CellFound(seen=dict(seen), ready_s=ready_s, delay_ms=delay_ms, loaded_bytes=loaded_bytes)


def groups(sides: Sequence[GridSide], *, size_bytes: int, free_bytes: int) -> list[list[GridSide]]:
    """Sides that run at once: all of them where memory allows, since rounds then compare like with like."""
    at_once = int(free_bytes / (_ROOM * size_bytes))
    count = max(1, min(len(sides), at_once))
    return [list(sides[first : first + count]) for first in range(0, len(sides), count)]


def _free_bytes() -> int:
    free: int = psutil.virtual_memory().available
    return free


async def _prompt(asker: Client, rig: Rig) -> list[int]:
    answer = await asker.ask(rig.server, "/tokenize", {"content": texts.CODE})
    tokens: list[int] = answer.document["tokens"]
    return tokens[: CONTEXT // 2]


def _duration(spec: GridSpec, sides: Sequence[GridSide], unsplit_ms: float) -> str:
    total_s = 0.0
    for cell in spec.cells:
        waits = [1000 * cell.latency_s * cell.hops(side) for side in sides]
        token_ms = (len(sides) + 1) * unsplit_ms + sum(waits)
        total_s += _START_S * len(sides) + spec.rounds * spec.tokens * token_ms / 1000
    return f"{len(spec.cells)} cells with {', '.join(sides)}: about {_minutes(total_s)} on a quiet machine"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _agreement(found: dict[Cell, CellFound]) -> str:
    other = set()
    for cell in found.values():
        expected = {answer.document["content"] for answer in cell.seen[GridSide.UNSPLIT]}
        for side, answers in cell.seen.items():
            if {answer.document["content"] for answer in answers} != expected:
                other.add(side)
    same = "texts at temperature 0 are equal on all sides"
    return same if not other else f"{same}, but for {', '.join(sorted(other))} in some cells"


_NOTES = (
    "nodes: the host and N − 1 workers, layers spread evenly over all of them; one thread in each process",
    "latency: one way, on every link; everything that crosses it is delayed, but for stock, compute delayed: "
    "there only commands that compute are, on their way to a worker",
    "all weights are in memory before anything is timed; the text is an edited program, which drafts from "
    "the text itself guess well (mesh-llm bench speculation has other texts)",
    "stock ggml-rpc: from the engine's own sources, in the same wheel, with the same CPU library and layers; "
    "the output head is on its last worker, where llama.cpp puts it, and on the host in ours",
)
