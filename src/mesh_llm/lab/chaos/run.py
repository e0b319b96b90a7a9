"""One run, from the first node to the last look at what is left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from mesh_llm.lab.chaos import faults, processes, records
from mesh_llm.lab.chaos.load import ClientLoad
from mesh_llm.lab.chaos.mesh import ChaosMesh, chaos_mesh
from mesh_llm.lab.chaos.questions import EMBEDDINGS, QUESTIONS, ChaosQuestion
from mesh_llm.lab.chaos.records import Asked, ChaosLog, Record
from mesh_llm.lab.chaos.schedule import Fault
from mesh_llm.lab.chaos.watch import look_at_processes, watch
from mesh_llm.tasks import cancelled, task_group

HEAL_S = 90.0
"""For all nodes to serve together after the last fault: the longest that a node is kept out is a minute."""
ORPHAN_S = 10.0
"""For the last children to end after their nodes."""
_POLL_S = 0.2

Tell = Callable[[str], None]


async def run(
    asked: Asked,
    log: ChaosLog,
    *,
    tell: Tell,
    only: Collection[str] | None = None,
) -> list[Record]:
    """The records of a run, which are in the log as well. `only` names questions; None: all are asked."""
    questions = EMBEDDINGS if asked.embeddings else QUESTIONS
    if only is not None:
        questions = {name: each for name, each in questions.items() if name in only}
    folder = Path(tempfile.mkdtemp(prefix="mesh-llm-chaos-"))
    missing = faults.left_out()
    wanted = tuple(each for each in asked.faults if each.kind not in missing)
    records.write_asked(log, asked, left_out=missing)
    try:
        async with chaos_mesh(folder, log, model=asked.model, embeddings=asked.embeddings, tell=tell) as mesh:
            await _run(mesh, asked, wanted, log, questions, tell)
        await _look_for_orphans(mesh.mark, log)
        log.write("end")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return log.records


async def _run(
    mesh: ChaosMesh,
    asked: Asked,
    wanted: tuple[Fault, ...],
    log: ChaosLog,
    questions: Mapping[str, ChaosQuestion],
    tell: Tell,
) -> None:
    load = ClientLoad(mesh, log, questions)
    tell("Asking everything once, undisturbed")
    for text in await load.references():
        tell(f"Not asked, as this model does not answer it: {text}")
    look_at_processes(mesh, log)
    log.begin()
    watching = asyncio.create_task(watch(mesh, log), name="watch")
    try:
        async with task_group() as group:
            for number in range(asked.clients):
                group.create_task(load.run(number, asked.seed), name=f"client {number}")
            await _strike_all(mesh, wanted, log, tell)
            await asyncio.sleep(max(0.0, 60 * asked.minutes - log.now_s()))
            load.stop()
        await _settle(mesh, load, log, tell)
    finally:
        await cancelled(watching)


async def _strike_all(mesh: ChaosMesh, wanted: tuple[Fault, ...], log: ChaosLog, tell: Tell) -> None:
    """Each at its time; returns when all are over."""
    async with task_group() as group:
        for number, fault in enumerate(wanted):
            await asyncio.sleep(max(0.0, fault.at_s - log.now_s()))
            lasts = f" for {fault.for_s:.1f} s" if fault.for_s else ""
            tell(f"{log.now_s():7.1f} s  {fault.kind} {fault.node}{lasts}")
            group.create_task(faults.strike(mesh, log, number, fault), name=f"fault {number}")


async def _settle(mesh: ChaosMesh, load: ClientLoad, log: ChaosLog, tell: Tell) -> None:
    tell("Waiting until all nodes serve together again")
    whole = await mesh.until_whole(within_s=HEAL_S)
    why = "" if whole else f"{sorted(mesh.members)} run, and do not agree after {HEAL_S:.0f} s"
    wrong = await load.check()
    look_at_processes(mesh, log)
    log.write("settled", whole=whole, why=why, wrong=wrong)


async def _look_for_orphans(mark: str, log: ChaosLog) -> None:
    """After the end of all nodes nothing of them is left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ORPHAN_S):
            while processes.orphans(mark):
                await asyncio.sleep(_POLL_S)
            return
    for orphan in processes.orphans(mark):
        with suppress(psutil.Error):
            log.write("orphan", pid=orphan.pid, command=" ".join(orphan.cmdline())[-80:], last=True)
