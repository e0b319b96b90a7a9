"""Processes of the laboratory: limits that are taken back as they were, and one that cannot be started."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mesh_llm.errors import MeshError
from mesh_llm.lab.chaos import mesh, processes
from mesh_llm.lab.chaos.records import ChaosLog

needs_limits = pytest.mark.skipif(not processes.can_limit(), reason="only Linux limits other processes")

SOFT, HARD = 1 << 40, 1 << 41
PARENT = f"""
import resource, subprocess, sys
for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
    resource.setrlimit(what, ({SOFT}, {HARD}))
children = []
def start():
    children.append(subprocess.Popen(["sleep", "600"]))
    print(children[-1].pid, flush=True)
start()
for line in sys.stdin:
    start()
for child in children:
    child.kill()
    child.wait()
"""
"""Has a finite hard limit, as on many clusters; starts a child at once and one for each line."""


class Family:
    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent
        self.parent = psutil.Process(parent.pid)
        self.child = self._started()

    def another(self) -> psutil.Process:
        assert self._parent.stdin is not None
        self._parent.stdin.write("\n")
        self._parent.stdin.flush()
        return self._started()

    def end(self) -> None:
        self._parent.communicate(timeout=20)

    def _started(self) -> psutil.Process:
        assert self._parent.stdout is not None
        return psutil.Process(int(self._parent.stdout.readline()))


@pytest.fixture
def family() -> Iterator[Family]:
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        yield Family(parent)


def limits(what: int, *found: psutil.Process) -> list[tuple[int, int]]:
    return [resource.prlimit(each.pid, what) for each in found]


@needs_limits
def test_a_full_disk_is_as_it_was_before(family: Family) -> None:
    parent, child = family.parent, family.child
    with processes.full_disk(parent.pid):
        # One that is started meanwhile has the same disk.
        later = family.another()
        assert limits(resource.RLIMIT_FSIZE, parent, child, later) == [(0, HARD)] * 3
    assert limits(resource.RLIMIT_FSIZE, parent, child, later) == [(SOFT, HARD)] * 3


@needs_limits
def test_full_memory_is_as_it_was_before(family: Family) -> None:
    child = family.child
    with processes.full_memory([family.parent, child]):
        [(soft, hard)] = limits(resource.RLIMIT_AS, child)
        assert child.memory_info().vms < soft < SOFT
        assert hard == HARD
    assert limits(resource.RLIMIT_AS, family.parent, child) == [(SOFT, HARD)] * 2


@needs_limits
def test_processes_that_ended_meanwhile_are_no_trouble(family: Family) -> None:
    with processes.full_disk(family.parent.pid), processes.full_memory([family.child]):
        family.end()
    assert not psutil.pid_exists(family.parent.pid)


async def test_a_node_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "module", lambda name: ["/nowhere/python", "-m", name])
    nodes = mesh.ChaosMesh(tmp_path, ChaosLog(None), model=None, embeddings=False)

    async with asyncio.timeout(20):
        with pytest.raises(MeshError, match="cannot start /nowhere/python"):
            await nodes.start("one")

    assert nodes.members == {}
