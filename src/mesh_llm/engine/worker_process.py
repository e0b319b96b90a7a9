"""The node's side of a worker child: start it, hand it links, hear of its sessions."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from mesh_llm.defaults import WORKER_HAND_OVER_S
from mesh_llm.engine.diagnostics import explain, sentence
from mesh_llm.engine.machine import oom_kills
from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import EngineFailed

WORKER_READY_S = 60.0
"""It loads libraries and maps files; a minute means that it hangs."""
WORKER_BEAT_S = 1.0
WORKER_BEATS = 6
"""Unanswered in a row: one that hangs holds up every answer, one that swaps comes back sooner."""


log = logging.getLogger(__name__)


class WorkerProcess:
    """A running worker child. Made by `lend`."""

    def __init__(self, child: Child, socket_path: Path) -> None:
        self.child = child
        self.death: asyncio.Task[str] | None = None
        """Ends when the worker does, with the reason."""
        self.faults: list[str] = []
        """What clients did wrong, in the order in which their sessions ended."""
        self.hung = False
        """Whether it was ended because it did not answer."""
        self.ended_for: str | None = None
        """Why it was ended, where it was."""
        self.socket = str(socket_path)

    async def serve(self, link: socket.socket) -> None:
        """Hand over an engine's link; the worker owns it from here on."""
        await asyncio.to_thread(self._hand_over, link, {"kind": "session"})

    async def add_peer(self, number: int, link: socket.socket) -> None:
        """Hand over a link to another worker, which this one is to call `number`."""
        await asyncio.to_thread(self._hand_over, link, {"kind": "peer", "number": number})

    async def drop_peer(self, number: int) -> None:
        """Close the link to another worker, if it is still there."""
        await asyncio.to_thread(self._drop_peer, number)

    async def add_model(
        self, fingerprint: str, files: Sequence[str], tensors: Sequence[str] | None = None
    ) -> None:
        """Tell the worker of a model on this machine's disk, of which perhaps only some tensors are there."""
        part = {} if tensors is None else {"tensors": list(tensors)}
        await self._ask({"kind": "model", "fingerprint": fingerprint, "files": list(files), **part})

    async def prepare(
        self,
        fingerprint: str,
        layers: tuple[int, int],
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> int:
        """Read layers (first, and last not included) into memory ahead of their use; the bytes it then holds.

        `progress` gets bytes, done and in all.
        """
        return await self._ask(
            {"kind": "prepare", "fingerprint": fingerprint, "layers": list(layers)}, progress
        )

    async def unload(self, fingerprint: str) -> int:
        """Drop a model's weights that no engine uses; the bytes that are still held, of all models."""
        return await self._ask({"kind": "unload", "fingerprint": fingerprint})

    def end(self, reason: str) -> None:
        """At once; whoever has a lease hears why."""
        self.ended_for = reason
        self.child.signal_group(signal.SIGKILL)

    async def watch(self) -> None:
        """Ends a worker that hangs, so that its death says so; until cancelled, or the worker's end."""
        missed = 0
        # Counted, not timed: after a nap of the whole machine the worker gets as many tries as ever.
        while missed < WORKER_BEATS:
            answers, _ = await asyncio.gather(self._answers(), asyncio.sleep(WORKER_BEAT_S))
            missed = 0 if answers else missed + 1
        self.hung = True
        self.child.signal_group(signal.SIGKILL)

    async def _answers(self) -> bool:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(WORKER_BEAT_S):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                with closing(writer):
                    writer.write(b'{"kind": "beat"}\n')
                    await reader.readline()
                    return True
        return False

    async def _ask(
        self, request: dict[str, Any], progress: Callable[[int, int], None] = lambda *_: None
    ) -> int:
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError as error:
            raise EngineFailed(f"the worker does not answer: {error.strerror or error}") from error
        with closing(writer):
            writer.write(json.dumps(request).encode() + b"\n")
            # Ends with the worker, if not before: with a reset where it had not read all.
            with suppress(ConnectionError):
                async for line in reader:
                    match json.loads(line):
                        case {"done_bytes": done, "total_bytes": total}:
                            progress(done, total)
                        case {"fault": fault}:
                            raise EngineFailed(f"the worker refused: {sentence(fault)}")
                        case {"resident_bytes": int(resident)}:
                            return resident
        raise EngineFailed("the worker ended in the middle of an answer")

    def _drop_peer(self, number: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, suppress(OSError):
            door.settimeout(WORKER_HAND_OVER_S)
            door.connect(self.socket)
            door.sendall(json.dumps({"kind": "drop", "number": number}).encode() + b"\n")
            door.recv(64)

    def _hand_over(self, link: socket.socket, what: dict[str, Any]) -> None:
        with link, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(WORKER_HAND_OVER_S)
            try:
                door.connect(self.socket)
                socket.send_fds(door, [json.dumps(what).encode() + b"\n"], [link.fileno()])
                accepted = door.recv(64)
            except OSError as error:
                raise EngineFailed(f"the worker does not take a link: {error.strerror or error}") from error
            if not accepted:
                raise EngineFailed("the worker closed a link that it was handed")


@asynccontextmanager
async def lend(spec: WorkerSpec) -> AsyncIterator[WorkerProcess]:
    """A worker child for the length of the block."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed: list[str] = []
    worker_process: WorkerProcess | None = None

    def on_event(line: str) -> None:
        event = json.loads(line)
        match event["event"]:
            case "ready" if not ready.done():
                ready.set_result(None)
            case "failed":
                failed.append(sentence(event["cause"]))
            case "ended" if worker_process is not None and event["fault"]:
                fault = sentence(event["fault"])
                log.warning("worker session ended: %s", fault)
                worker_process.faults.append(fault)

    async with spawn(
        module("mesh_llm.engine.children.worker"), on_stdout=on_event, on_stderr=log.debug
    ) as child:
        worker_process = WorkerProcess(child, Path(spec.socket))
        await child.send(spec.to_line(), close=False)
        ended = asyncio.create_task(_death(worker_process, failed), name="worker exit")
        worker_process.death = ended
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((ready, ended), timeout=WORKER_READY_S, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineFailed(ended.result())
            if not ready.done():
                raise EngineFailed(f"the worker was not ready within {WORKER_READY_S:.0f} s")
            watch = asyncio.create_task(worker_process.watch(), name="worker beats")
            yield worker_process
        finally:
            ended.cancel()
            if watch is not None:
                watch.cancel()
                await asyncio.wait((watch,))
            Path(spec.socket).unlink(missing_ok=True)


async def _death(worker_process: WorkerProcess, failed: list[str]) -> str:
    """Wait for the worker's end, and say why it came."""
    child = worker_process.child
    kills_before = oom_kills()
    status = await child.wait()
    if worker_process.hung:
        log.warning("worker hung pid=%d", child.pid)
        return f"the worker did not answer for {WORKER_BEATS * WORKER_BEAT_S:.0f} s, and was ended"
    if worker_process.ended_for is not None:
        return worker_process.ended_for
    death = explain(
        status=status,
        failed=failed[0] if failed else None,
        lines=tuple(child.recent),
        oom_killed=oom_kills() > kills_before,
    )
    reason = death.sentence.replace("the engine", "the worker")
    log.warning("worker died cause=%s: %s", death.cause, reason)
    return reason
