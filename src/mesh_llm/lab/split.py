"""A split engine on one machine: worker children, links between them, an engine child over them.

What tests and benchmarks use until nodes find each other by themselves, and
afterwards where a mesh would only be in the way.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field
from pathlib import Path

from mesh_llm.engine.spec import DraftSpec, EngineSpec, LinkSpec, MainMemorySpec, StatesSpec, WorkerSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.errors import EngineFailed
from mesh_llm.frozen import frozen
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.delay import Line, Lines, delay_lines
from mesh_llm.lab.quic import QuicLine, Splicing, quic_lines
from mesh_llm.types import ModelFacts, Setting

READY_S = 120.0


@frozen
class SplitPlan:
    """Layers per worker, in order; what is left over is the host's own and comes first."""

    facts: ModelFacts
    libraries: dict[str, Path]
    workers: tuple[int, ...]
    threads: int = 1
    context: int = 2048
    slots: int = 1
    quota_bytes: int = 8 << 30
    push: bool = True
    """Links between neighbouring workers; without them the host relays."""
    by_reference: bool = True
    """Workers have the model's files; without them its weights are sent."""
    delay_s: float = 0.0
    """One way, on every link."""
    conditions: Conditions | None = None
    """Of every link, both ways, where it does more than delay; then `delay_s` does not count."""
    splicing: Splicing | None = None
    """Links over QUIC, through two processes with an endpoint each; without it they are mere sockets."""
    cache_type: str = "f16"
    embeddings: bool = False
    device: str = "CPU"
    """That workers lend."""
    host_libraries: dict[str, Path] | None = None
    """Where the host has others than the workers."""
    host_device: str | None = None
    """A GPU of the host's for its own layers and the head; without one they are its CPU's."""
    head_on_worker: bool = False
    poison: bool = False
    main_memory: MainMemorySpec | None = None
    """See `WorkerSpec`."""
    trace: Path | None = None
    """A file for the engine's frames; workers write to files of their own beside it."""
    draft: DraftSpec = field(default_factory=DraftSpec)
    states: StatesSpec | None = None
    settings: dict[str, Setting] = field(default_factory=dict)

    @property
    def link(self) -> Conditions:
        return self.conditions or Conditions(delay_s=self.delay_s)


@frozen
class SplitEngine:
    url: str
    key: str
    supervisor: EngineSupervisor
    workers: tuple[WorkerProcess, ...]
    delays: Lines
    """What the links' delays really were, and what went over them; none without a delay."""


@asynccontextmanager
async def split_engine(plan: SplitPlan, workers: Sequence[WorkerProcess] = ()) -> AsyncIterator[SplitEngine]:
    """Serves for the length of the block, over new workers or over those given, linked already."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-lab-")))
        lines: list[Line] = []
        quic: list[QuicLine] | None = None if plan.splicing is None else []
        if not workers:
            workers = [
                await stack.enter_async_context(lend(worker_spec(plan, folder / f"{index}.sock")))
                for index in range(len(plan.workers))
            ]
            if plan.push:
                await link_neighbours(workers, link=plan.link, lines=lines, quic=quic)
        ends = []
        for worker in workers:
            here, there = _link(plan.link, lines, quic)
            ends.append(stack.enter_context(here))
            await worker.serve(there)
        delays = await stack.enter_async_context(delay_lines(lines)) if lines else Lines()
        if quic:
            await stack.enter_async_context(quic_lines(quic, plan.splicing))
        supervisor = await stack.enter_async_context(_engine(plan, ends, folder / "engine.log"))
        yield SplitEngine(
            url=f"http://127.0.0.1:{supervisor.report.port}",
            key=supervisor.spec.key,
            supervisor=supervisor,
            workers=tuple(workers),
            delays=delays,
        )


def worker_spec(plan: SplitPlan, path: Path) -> WorkerSpec:
    files = [str(file) for file in plan.facts.files]
    return WorkerSpec(
        socket=str(path),
        device=plan.device,
        threads=plan.threads,
        quota_bytes=plan.quota_bytes,
        libraries={name: str(library) for name, library in plan.libraries.items()},
        models={plan.facts.fingerprint: files} if plan.by_reference else {},
        trace=f"{plan.trace}.{path.stem}" if plan.trace else None,
        poison=plan.poison,
        main_memory=plan.main_memory,
    )


def _link(
    link: Conditions, lines: list[Line], quic: list[QuicLine] | None
) -> tuple[socket.socket, socket.socket]:
    """The two ends of a link; QUIC in between where there is a list for it, and a line where it is slow."""
    here, there = socket.socketpair()
    if quic is not None:
        one, far = socket.socketpair()
        quic.append(QuicLine(one=there, other=one))
        there = far
    if link.is_open:
        return here, there
    near, far = socket.socketpair()
    lines.append(Line(one=there, other=near, there=link, back=link))
    return here, far


async def link_neighbours(
    workers: Sequence[WorkerProcess],
    *,
    link: Conditions,
    lines: list[Line],
    quic: list[QuicLine] | None = None,
) -> None:
    for index in range(len(workers) - 1):
        here, there = _link(link, lines, quic)
        await workers[index].add_peer(index + 1, here)
        await workers[index + 1].add_peer(index, there)


@asynccontextmanager
async def _engine(
    plan: SplitPlan, ends: Sequence[socket.socket], log_file: Path
) -> AsyncIterator[EngineSupervisor]:
    ready = asyncio.Event()

    def on_change(report: EngineReport) -> None:
        if report.state is EngineState.READY:
            ready.set()

    supervisor = EngineSupervisor(engine_spec(plan, ends), log_file, on_change)
    running = asyncio.create_task(supervisor.run(), name="engine")
    waiting = asyncio.create_task(ready.wait(), name="engine ready")
    try:
        await asyncio.wait((running, waiting), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not ready.is_set():
            raise EngineFailed(f"the split engine was not ready within {READY_S:.0f} s")
        # The child has its own copies. With ours open, workers would not notice that it died.
        for end in ends:
            end.close()
        yield supervisor
    finally:
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


def engine_spec(plan: SplitPlan, ends: Sequence[socket.socket]) -> EngineSpec:
    """What the engine child is told; `ends` are its links to the plan's workers."""
    last = len(ends) - 1
    return EngineSpec(
        model=str(plan.facts.files[0]),
        alias="split",
        context=plan.context * plan.slots,
        slots=plan.slots,
        threads=plan.threads,
        key=secrets.token_urlsafe(16),
        cache_type_k=plan.cache_type,
        cache_type_v=plan.cache_type,
        embeddings=plan.embeddings,
        libraries={name: str(library) for name, library in (plan.host_libraries or plan.libraries).items()},
        settings=plan.settings,
        files=tuple(str(file) for file in plan.facts.files),
        fingerprint=plan.facts.fingerprint,
        send_weights=not plan.by_reference,
        devices=(plan.host_device,) if plan.host_device else (),
        gpu_layers=_own_layers(plan) if plan.host_device else 0,
        head_on_worker=plan.head_on_worker,
        trace=str(plan.trace) if plan.trace else None,
        draft=plan.draft,
        states=plan.states,
        head_tied=plan.facts.head_bytes == 0,
        links=tuple(
            LinkSpec(
                name=f"MESH{index}",
                fd=end.fileno(),
                layers=layers,
                next_number=index + 1 if plan.push and index < last else None,
            )
            for index, (end, layers) in enumerate(zip(ends, plan.workers, strict=True))
        ),
    )


def _own_layers(plan: SplitPlan) -> int:
    """The host's, as the engine counts: the head is one more where no worker's layers follow."""
    return len(plan.facts.layers) - sum(plan.workers) + (not plan.workers)
