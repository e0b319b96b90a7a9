"""Looks at nodes and processes while a run lasts, and writes down what it saw."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

from mesh_llm.errors import MeshError
from mesh_llm.lab.chaos import processes
from mesh_llm.lab.chaos.mesh import ChaosMember, ChaosMesh
from mesh_llm.lab.chaos.records import ChaosLog

STATUS_S = 2.0
"""Between two looks at what nodes say."""
USAGE_EVERY = 3
"""Looks at nodes for each one at processes: going through all of them takes a while."""
ANSWER_S = 3.0
"""For a node to tell; one that stands still does not."""


async def watch(mesh: ChaosMesh, log: ChaosLog) -> None:
    """Until cancelled."""
    count = 0
    while True:
        await asyncio.gather(*(_look_at(member, log) for member in list(mesh.members.values())))
        if count % USAGE_EVERY == 0:
            look_at_processes(mesh, log)
        count += 1
        await asyncio.sleep(STATUS_S)


async def _look_at(member: ChaosMember, log: ChaosLog) -> None:
    at = log.now_s()
    with suppress(MeshError, TimeoutError, LookupError, TypeError):
        async with asyncio.timeout(ANSWER_S):
            document = await member.status()
        plan = document["plan"] or {}
        log.write(
            "status",
            at=at,
            name=member.name,
            state=document["node"]["state"],
            epoch=plan.get("epoch"),
            host=plan.get("host"),
            stages=[stage["node"] for stage in plan.get("stages", ())],
            members={each["id"]: each["standing"] for each in document["mesh"]["nodes"]},
        )


def look_at_processes(mesh: ChaosMesh, log: ChaosLog) -> None:
    for member in list(mesh.members.values()):
        _weigh(member.name, "node", member.pid, log)
        for role, module in (("engine", processes.ENGINE), ("worker", processes.WORKER)):
            for child in processes.children(member.pid, module):
                _weigh(member.name, role, child.pid, log)
        size = sum(file.stat().st_size for file in member.home.path.rglob("*") if file.is_file())
        log.write("disk", name=member.name, bytes=size)
    for orphan in processes.orphans(mesh.mark):
        with suppress(psutil.Error):
            log.write("orphan", pid=orphan.pid, command=" ".join(orphan.cmdline())[-80:])


def _weigh(name: str, role: str, pid: int, log: ChaosLog) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            log.write(
                "usage",
                name=name,
                role=role,
                pid=pid,
                rss_bytes=process.memory_info().rss,
                descriptors=process.num_fds(),
                threads=process.num_threads(),
            )
