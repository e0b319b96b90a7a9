"""What each kind of fault does, and how it is undone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import psutil

from mesh_llm.engine.process import signal_process
from mesh_llm.errors import MeshError
from mesh_llm.lab.chaos import processes
from mesh_llm.lab.chaos.mesh import ChaosMember, ChaosMesh, native_folder
from mesh_llm.lab.chaos.records import ChaosLog
from mesh_llm.lab.chaos.schedule import Fault

REVOKED_S = 20.0
"""For a node that was revoked to notice, and end."""


def left_out() -> dict[str, str]:
    """Kinds that this machine cannot have, each with the reason."""
    reasons: dict[str, str] = {}
    if not processes.can_limit():
        why = "another process's limits can be set on Linux alone"
        reasons |= {"fill-disk": why, "fill-memory": why}
    if native_folder() is None:
        reasons["upgrade-node"] = "another version needs the native sources beside it, and they are not here"
    return reasons


async def strike(mesh: ChaosMesh, log: ChaosLog, number: int, fault: Fault) -> None:
    """Do it, wait, undo it."""
    told: dict[str, Any] = {
        "fault": fault.kind,
        "node": fault.node,
        "for_s": fault.for_s,
        "amount": fault.amount,
    }
    try:
        async with _alone(mesh, fault):
            # Before it is done: a node that is killed takes its clients' answers along at once.
            log.write("fault", number=number, phase="begin", **told)
            async with _KINDS[fault.kind](mesh, fault):
                await asyncio.sleep(fault.for_s)
    except MeshError as error:
        # Most often: what it was to strike is not there just now.
        log.write("fault", number=number, phase="failed", why=error.message, **told)
    else:
        log.write("fault", number=number, phase="end", **told)


@asynccontextmanager
async def _alone(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    """On a slow machine the fault before may take longer than the schedule thinks."""
    if fault.node in mesh.struck:
        raise MeshError(f"node {fault.node} is still being struck")
    mesh.struck.add(fault.node)
    try:
        yield
    finally:
        mesh.struck.discard(fault.node)


def _member(mesh: ChaosMesh, fault: Fault) -> ChaosMember:
    member = mesh.members.get(fault.node)
    if member is None:
        raise MeshError(f"node {fault.node} is not running")
    return member


async def _hosting(mesh: ChaosMesh) -> ChaosMember:
    if (member := await mesh.host()) is None:
        raise MeshError("no node has an engine just now")
    return member


@asynccontextmanager
async def _kill_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    await mesh.kill(fault.node)
    yield
    await mesh.start(fault.node)
    await mesh.until_ready(fault.node)


@asynccontextmanager
async def _stop_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    pid = _member(mesh, fault).pid
    processes.pause(pid, family=False)
    try:
        yield
    finally:
        processes.resume(pid, family=False)


@asynccontextmanager
async def _freeze_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    pid = _member(mesh, fault).pid
    processes.pause(pid, family=True)
    try:
        yield
    finally:
        processes.resume(pid, family=True)


@asynccontextmanager
async def _restart_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    stopping = asyncio.create_task(mesh.stop(fault.node), name=f"stop {fault.node}")
    yield
    await stopping
    await mesh.start(fault.node)
    await mesh.until_ready(fault.node)


@asynccontextmanager
async def _upgrade_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    stopping = asyncio.create_task(mesh.stop(fault.node), name=f"stop {fault.node}")
    yield
    await stopping
    await mesh.start(fault.node, newer=True)
    await mesh.until_ready(fault.node)


@asynccontextmanager
async def _revoke_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    """It has to end by itself, and again when it tries to come back. A new one joins in its place."""
    member = _member(mesh, fault)
    await mesh.revoke(fault.node)
    yield
    await _until_gone(mesh, member)
    await _until_gone(mesh, await mesh.start(fault.node))
    await mesh.start(fault.node, token=await mesh.token(but=fault.node))
    await mesh.until_ready(fault.node)


async def _until_gone(mesh: ChaosMesh, member: ChaosMember) -> None:
    if not (await asyncio.wait((member.task,), timeout=REVOKED_S))[0]:
        await mesh.kill(member.name)


@asynccontextmanager
async def _join_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    await mesh.start(fault.node, token=await mesh.token())
    try:
        yield
    finally:
        with suppress(MeshError):
            await mesh.stop(fault.node)


@asynccontextmanager
async def _cut_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    cut = _member(mesh, fault)
    await mesh.cut_off(cut.id)
    try:
        yield
    finally:
        await mesh.reconnect(cut.id)


@asynccontextmanager
async def _slow_node(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    member = _member(mesh, fault)
    await member.tell(delay_s=fault.amount)
    try:
        yield
    finally:
        await member.tell(delay_s=0.0)


@asynccontextmanager
async def _fill_disk(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    with processes.full_disk(_member(mesh, fault).pid):
        yield


@asynccontextmanager
async def _fill_memory(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    pid = _member(mesh, fault).pid
    found = [each for name in (processes.ENGINE, processes.WORKER) for each in processes.children(pid, name)]
    if not found:
        raise MeshError(f"node {fault.node} has no child just now")
    with processes.full_memory(found):
        yield


@asynccontextmanager
async def _jump_clock(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    member = _member(mesh, fault)
    await member.tell(clock_s=fault.amount)
    try:
        yield
    finally:
        await member.tell(clock_s=0.0)


@asynccontextmanager
async def _kill_engine(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    for engine in processes.children((await _hosting(mesh)).pid, processes.ENGINE):
        signal_process(engine, signal.SIGKILL)
    yield


@asynccontextmanager
async def _stop_engine(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    engines = processes.children((await _hosting(mesh)).pid, processes.ENGINE)
    async with _paused(engines):
        yield


@asynccontextmanager
async def _kill_worker(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    for worker in _workers(mesh, fault):
        signal_process(worker, signal.SIGKILL)
    yield


@asynccontextmanager
async def _stop_worker(mesh: ChaosMesh, fault: Fault) -> AsyncIterator[None]:
    async with _paused(_workers(mesh, fault)):
        yield


def _workers(mesh: ChaosMesh, fault: Fault) -> list[psutil.Process]:
    """Of the node that is meant; it may host, and have none: then of any other one."""
    members = [_member(mesh, fault), *mesh.members.values()]
    for member in members:
        if found := processes.children(member.pid, processes.WORKER):
            return found
    raise MeshError("no node has a worker just now")


@asynccontextmanager
async def _paused(found: list[psutil.Process]) -> AsyncIterator[None]:
    for each in found:
        signal_process(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in found:
            signal_process(each, signal.SIGCONT)


_KINDS: dict[str, Callable[[ChaosMesh, Fault], AbstractAsyncContextManager[None]]] = {
    "kill-node": _kill_node,
    "stop-node": _stop_node,
    "freeze-node": _freeze_node,
    "restart-node": _restart_node,
    "upgrade-node": _upgrade_node,
    "revoke-node": _revoke_node,
    "join-node": _join_node,
    "cut-node": _cut_node,
    "slow-node": _slow_node,
    "fill-disk": _fill_disk,
    "fill-memory": _fill_memory,
    "jump-clock": _jump_clock,
    "kill-engine": _kill_engine,
    "stop-engine": _stop_engine,
    "kill-worker": _kill_worker,
    "stop-worker": _stop_worker,
}
