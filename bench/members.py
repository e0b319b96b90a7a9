"""CPU time of a member in a mesh of a thousand: idle, when facts change, when nodes fall and return."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import revision, servers
from bench.plan import Plan
from bench.report import Row, Side, plain_row, ratio_row
from bench.revision import Tree, Trees
from bench.stats import at_most
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import following
from mesh_llm.engine.process import Child, spawn
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "CPU time of a member in a large mesh"

NODES, QUICK_NODES = 1000, 100
MOST = at_most(1.3)
_PROGRAM = Path(__file__).parent / "members_program.py"
_START_S = 1200.0
"""Until everybody in a mesh of a thousand knows everybody: three minutes on a quiet machine."""
_PHASE_S = 300.0
"""For one phase of one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One thing that a mesh goes through, over so many simulated seconds in each round."""

    name: str
    title: str
    seconds: float
    full: int
    quick: int
    """Rounds."""
    full_s: float
    per_thousand: int = 0
    whole: bool = False
    """CPU time of all who take part, not for each node and second."""

    def nodes(self, mesh: int) -> int:
        return max(1, self.per_thousand * mesh // 1000) if self.per_thousand else 0

    def request(self, mesh: int) -> bytes:
        document = {"phase": self.name, "seconds": self.seconds, "nodes": self.nodes(mesh)}
        return json.dumps(document).encode() + b"\n"

    def figure(self, answer: dict[str, Any], mesh: int) -> float:
        """In milliseconds."""
        share = 1.0 if self.whole else mesh * float(answer["simulated_s"])
        return 1e3 * float(answer["cpu_s"]) / share

    @property
    def unit(self) -> str:
        return "ms" if self.whole else "ms/s"


# In this order: each one starts from a mesh that is quiet, and none is after the last one.
PHASES = (
    Phase(name="idle", title="idle", seconds=1.0, full=9, quick=15, full_s=40.0),
    Phase(name="facts", title="facts change", seconds=1.0, per_thousand=1, full=7, quick=9, full_s=80.0),
    Phase(
        name="crash",
        title="nodes crash and return",
        seconds=10.0,
        per_thousand=1,
        full=3,
        quick=5,
        full_s=130.0,
    ),
    Phase(
        name="newcomer",
        title="a newcomer's first synchronisation",
        seconds=8.0,
        whole=True,
        full=15,
        quick=15,
        full_s=30.0,
    ),
)

Seen = dict[str, dict[str, list[float]]]
"""Figures by phase and side."""


class Simulation:
    """A process with a mesh in it."""

    def __init__(self, child: Child, lines: asyncio.Queue[str], nodes: int) -> None:
        self._child, self._lines, self.nodes = child, lines, nodes

    async def measure(self, phase: Phase) -> float:
        await self._child.send(phase.request(self.nodes), close=False)
        return phase.figure(await self.read(_PHASE_S), self.nodes)

    async def read(self, timeout_s: float) -> dict[str, Any]:
        line = asyncio.create_task(self._lines.get(), name="a line of the simulated mesh")
        gone = asyncio.create_task(self._child.wait(), name="end of the simulated mesh")
        try:
            await asyncio.wait((line, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                state = "ended" if gone.done() else f"said nothing for {timeout_s:.0f} s"
                raise MeshError(
                    f"a simulated mesh of {self.nodes} {state}: {' / '.join(list(self._child.recent)[-3:])}"
                )
            document: dict[str, Any] = json.loads(line.result())
            return document
        finally:
            line.cancel()
            gone.cancel()


@asynccontextmanager
async def simulation(tree: Tree, nodes: int) -> AsyncIterator[Simulation]:
    """A mesh of this tree's members, warm."""
    argv = following([sys.executable, "-P", str(_PROGRAM), str(nodes)])
    lines: asyncio.Queue[str] = asyncio.Queue()
    env = servers.environment(tree)
    async with spawn(argv, on_stdout=lines.put_nowait, on_stderr=_ignore, env=env) as child:
        found = Simulation(child, lines, nodes)
        ready = await found.read(_START_S)
        strays = [path for path in ready["files"] if not tree.holds(path)]
        if strays:
            raise MeshError(f"the members of {tree.name} ({tree.commit}) would be those of {strays[0]}")
        yield found


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    here = Tree(name=revision.NOW, root=revision.ROOT, commit="this tree")
    seen, notes = await _rounds((here,), plan)
    rows = (
        plain_row(
            _title(phase, plan),
            Side(name="members", sample=Sample.of(seen[phase.name][here.name]), unit=phase.unit, digits=3),
            None,
        )
        for phase in PHASES
    )
    return tuple(rows), notes


async def compare(plan: Plan, trees: Trees) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen, notes = await _rounds(trees.both, plan)
    rows = (
        ratio_row(
            _title(phase, plan),
            revision.sides(seen[phase.name], phase.unit, digits=3),
            None if phase.whole else MOST,
        )
        for phase in PHASES
    )
    return tuple(rows), notes


async def _rounds(trees: Sequence[Tree], plan: Plan) -> tuple[Seen, tuple[str, ...]]:
    nodes = _nodes(plan)
    seen: Seen = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as stack:
        # Side by side: nothing is measured yet.
        started = [asyncio.create_task(_entered(stack, tree, nodes), name=tree.name) for tree in trees]
        try:
            meshes = dict(zip((tree.name for tree in trees), await asyncio.gather(*started), strict=True))
        finally:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
        notes = [f"{phase.title}, {await _turns(meshes, phase, plan, seen)}" for phase in PHASES]
    return seen, ("; ".join(notes), *_notes(nodes))


async def _entered(stack: AsyncExitStack, tree: Tree, nodes: int) -> Simulation:
    return await stack.enter_async_context(simulation(tree, nodes))


async def _turns(meshes: dict[str, Simulation], phase: Phase, plan: Plan, seen: Seen) -> str:
    rounds = plan.rounds(full=phase.full, quick=phase.quick, full_s=phase.full_s, quick_s=phase.full_s / 4)
    for number in rounds:
        for name, mesh in turns(list(meshes.items()), number):
            seen[phase.name][name].append(await mesh.measure(phase))
    return rounds.note()


def _nodes(plan: Plan) -> int:
    return plan.choose(full=NODES, quick=QUICK_NODES)


def _title(phase: Phase, plan: Plan) -> str:
    nodes = phase.nodes(_nodes(plan))
    return f"{phase.title}, {nodes} in {phase.seconds:g} s" if nodes else phase.title


def _notes(nodes: int) -> tuple[str, ...]:
    return (
        f"{nodes} simulated members in one process, a tick each 0.25 s",
        "CPU time of that process for each node and simulated second (ms/s), idling included; the "
        "simulator's own is in it on both sides; every message goes through JSON and back for each receiver",
        "a newcomer: CPU time of it and of the one member that teaches it, until it knows everybody; without "
        "a target: it happens once, and a newcomer has two signatures of everybody to verify",
    )


def _ignore(_: str) -> None:
    """What it says is kept for when it fails."""
