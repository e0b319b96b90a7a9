"""An 8B model over processes that share one GPU: ours, stock ggml-rpc, and the engine alone.

Not among the benches that run by default: it needs a GPU that the engine has a
library for (CUDA), and writes a synthetic model of 4 GB to a temporary folder.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.plan import Plan
from bench.report import Row, Side, plain_row
from bench.split_sides import side_of
from bench.stats import at_least, at_most
from mesh_llm.bench import rigs
from mesh_llm.bench.client import client
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.sides import Seen, complete, decode_speed, prefill_speed
from mesh_llm.engine import build
from mesh_llm.engine.cuda_mps import serves_this_user
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.errors import MeshError
from mesh_llm.lab.delay import OPEN
from mesh_llm.lab.split import SplitPlan, link_neighbours, worker_spec
from mesh_llm.models.facts import model_facts
from mesh_llm.results.samples import Sample
from mesh_llm.types import ModelFacts
from tests.support import tiny_gguf

TITLE = "An 8B model over processes that share one GPU"

GPU = "CUDA0"
PROMPT, SHORT, DECODED = 3001, 64, 200
_LLAMA_8B = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_size": 128,
    "feed_forward": 14336,
    "vocabulary": 32000,
    "context": 16384,
}
_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    plan: SplitPlan
    stock: bool = False
    judged: bool = False


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    built = await build.ensure((*build.STANDARD, "cuda", "rpc"), lambda _: None)
    for error in built.missing.values():
        raise MeshError(f"this bench needs a CUDA GPU and compiler: {error.message}")
    with tempfile.TemporaryDirectory(prefix="mesh-gpu-") as folder:
        model = tiny_gguf.write_large(Path(folder) / "8b.gguf", "Q4_0", **_LLAMA_8B)
        facts = model_facts(await read_gguf(model))
        rows: list[Row] = []
        for case in _cases(facts, built.libraries):
            loads: list[float] = []
            seen: Seen = defaultdict(list)
            async for rig, load_s in _started(case, Path(folder), turns=plan.choose(full=3, quick=2)):
                loads.append(load_s)
                await _ask(rig, seen, rounds=plan.choose(full=5, quick=3))
            rows += _rows(case, loads, seen)
    return tuple(rows), (
        f"synthetic llama of 32 layers, {facts.size_bytes / 1e9:.1f} GB, Q4_0, context 8192; "
        f"prefill of {PROMPT} tokens, decode of {DECODED} after a prompt of {SHORT}",
        "all processes share one GPU"
        + (" by CUDA's multi-process service" if serves_this_user() else ": their kernels take turns on it"),
        "load: from the start of the engine process until it answers; workers of ours run already, and from "
        "the second turn on hold the weights; those of stock are sent them each time",
    )


def _cases(facts: ModelFacts, libraries: dict[str, Path]) -> list[Case]:
    host = {name: path for name, path in libraries.items() if name != "rpc"}
    cpu_only = {name: path for name, path in libraries.items() if name != "cuda"}
    base = SplitPlan(
        facts=facts,
        libraries=libraries,
        host_libraries=host,
        workers=(),
        threads=_THREADS,
        context=8192,
        device=GPU,
        host_device=GPU,
        quota_bytes=32 << 30,
    )
    three = replace(base, workers=(11, 11, 10), host_device=None, host_libraries=cpu_only)
    return [
        Case(name="local", plan=base),
        Case(name="host + 2 workers", plan=replace(base, workers=(11, 11)), judged=True),
        Case(name="3 workers", plan=replace(three, head_on_worker=True), judged=True),
        Case(name="stock, 3 workers", plan=three, stock=True),
    ]


async def _started(case: Case, folder: Path, *, turns: int) -> AsyncIterator[tuple[Rig, float]]:
    """The same engine several times; workers of ours live on in between."""
    async with _workers(case, folder) as workers:
        for _ in range(turns):
            began = time.monotonic()
            async with rigs.stock(case.plan) if case.stock else rigs.ours(case.plan, workers) as rig:
                whole_s = time.monotonic() - began
                yield rig, rig.server.ready_s if case.stock else whole_s


@asynccontextmanager
async def _workers(case: Case, folder: Path) -> AsyncIterator[list[WorkerProcess]]:
    """Of ours; stock's are the engine's own, since each serves only once."""
    count = 0 if case.stock else len(case.plan.workers)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(lend(worker_spec(case.plan, folder / f"{index}.sock")))
            for index in range(count)
        ]
        await link_neighbours(workers, link=OPEN, lines=[])
        yield workers


async def _ask(rig: Rig, seen: Seen, *, rounds: int) -> None:
    prompt = [300 + (index * 7919) % 31000 for index in range(PROMPT)]
    async with client() as asker:
        await complete(asker, rig, prompt, 8)
        for _ in range(rounds):
            seen["prefill"].append(await complete(asker, rig, prompt, 1))
            seen["decode"].append(await complete(asker, rig, prompt[:SHORT], DECODED))


def _rows(case: Case, loads: list[float], seen: Seen) -> list[Row]:
    def speed(what: str, figure: Callable[..., float]) -> Side:
        return side_of(case.name, seen[what], figure, "tok/s")

    # The first start of ours reads the weights.
    again = loads[1:] if len(loads) > 1 and not case.stock else loads
    load = Side(name=case.name, sample=Sample.of(again), unit="s", digits=2)
    judged = case.judged
    return [
        plain_row(f"{case.name}: load", load, at_most(1.5) if judged else None),
        plain_row(
            f"{case.name}: prefill", speed("prefill", prefill_speed), at_least(9500) if judged else None
        ),
        plain_row(f"{case.name}: decode", speed("decode", decode_speed), at_least(250) if judged else None),
    ]
