"""Split engines to be measured: ours and stock ggml-rpc, over the same wheel, kernels and delay lines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from mesh_llm.bench import servers
from mesh_llm.bench.servers import Server
from mesh_llm.engine.process import module, spawn
from mesh_llm.engine.worker_process import WorkerProcess
from mesh_llm.errors import MeshError
from mesh_llm.lab.conditions import Conditions, Passage
from mesh_llm.lab.delay import DelayDoor, Lines, delay_lines
from mesh_llm.lab.split import SplitPlan, engine_spec, split_engine
from mesh_llm.types import StageCounters

_LISTEN_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """An engine over workers, or alone, and where to look at it."""

    server: Server
    workers: tuple[int, ...] = ()
    """Process ids."""
    lines: Lines | None = None
    """Where links have delays: what went over them."""
    log: Callable[[], str] = field(default=str, repr=False)
    """What the engine has logged so far."""

    stages: Callable[[], dict[str, StageCounters]] = field(default=dict, repr=False)
    """The engine's own counts by worker, as of a second ago; ours only."""

    async def passages(self) -> list[Passage]:
        return await self.lines.read() if self.lines is not None else []


@asynccontextmanager
async def ours(plan: SplitPlan, workers: Sequence[WorkerProcess] = ()) -> AsyncIterator[Rig]:
    """Through libggml-mesh; without workers the plain engine child."""
    async with split_engine(plan, workers) as engine:
        report = engine.supervisor.report
        assert report.pid is not None
        yield Rig(
            server=Server(url=engine.url, key=engine.key, pid=report.pid, ready_s=report.ready_s),
            workers=tuple(worker.child.pid for worker in engine.workers),
            lines=None if plan.link.is_open else engine.delays,
            log=engine.supervisor.log_text,
            stages=lambda: engine.supervisor.report.stages,
        )


@asynccontextmanager
async def stock(plan: SplitPlan, *, only_compute: bool = False) -> AsyncIterator[Rig]:
    """Through ggml-rpc: the same layers on as many workers, the output head on the last one.

    With `only_compute`, delays are those of commands that compute, to the worker, and of nothing else.
    """
    libraries = {name: str(path) for name, path in plan.libraries.items()}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(_stock_worker(libraries, plan)) for _ in plan.workers]
        endpoints, lines = [target for _, target in workers], None
        if not plan.link.is_open:
            doors = [_door(target, plan.link, rpc=only_compute) for target in endpoints]
            endpoints = [door.listener.getsockname() for door in doors]
            lines = await stack.enter_async_context(delay_lines((), doors))
        spec = engine_spec(replace(plan, workers=()), ())
        request = {
            "spec": asdict(spec),
            "endpoints": [f"{host}:{port}" for host, port in endpoints],
            "layers": plan.workers,
        }
        logged: list[str] = []
        server = await stack.enter_async_context(
            servers.program("mesh_llm.bench.stock_engine", request, spec.key, on_log=logged.append)
        )
        yield Rig(
            server=server,
            workers=tuple(pid for pid, _ in workers),
            lines=lines,
            log=lambda: "\n".join(logged),
        )


def _door(target: tuple[str, int], link: Conditions, *, rpc: bool) -> DelayDoor:
    listener = socket.create_server(("127.0.0.1", 0))
    return DelayDoor(listener=listener, target=target, there=link, back=link, rpc=rpc)


@asynccontextmanager
async def _stock_worker(
    libraries: dict[str, str], plan: SplitPlan
) -> AsyncIterator[tuple[int, tuple[str, int]]]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if not port.done():
            port.set_result(json.loads(line)["port"])

    argv = servers.following(module("mesh_llm.bench.stock_worker"))
    async with spawn(argv, on_stdout=on_line, on_stderr=lambda _: None, env=servers.ENVIRONMENT) as child:
        request = {"libraries": libraries, "threads": plan.threads, "device": plan.device}
        await child.send(json.dumps(request).encode() + b"\n", close=False)
        async with asyncio.timeout(servers.READY_S):
            target = "127.0.0.1", await port
        await _listening(target)
        yield child.pid, target


async def _listening(target: tuple[str, int]) -> None:
    """It does not say when; a client that comes and goes does it no harm."""
    try:
        async with asyncio.timeout(_LISTEN_S):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(*target)
                    writer.close()
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise MeshError(f"a stock worker did not listen within {_LISTEN_S:.0f} s") from None


def moved(before: Sequence[Passage], after: Sequence[Passage]) -> list[int]:
    """Bytes in each direction between two readings of the same lines."""
    return [late.size_bytes - early.size_bytes for early, late in zip(before, after, strict=True)]


def measured_delay_ms(passages: Sequence[Passage]) -> float:
    """One way, over all lines that carried anything: the mean of their medians."""
    busy = [passage.median_ms for passage in passages if passage.chunks]
    return sum(busy) / len(busy) if busy else 0.0
