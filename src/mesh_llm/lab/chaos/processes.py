"""The processes of a run: found by a mark in their environment, which every child inherits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil

from mesh_llm.engine.process import signal_process

MARK = "MESH_LLM_LAB"
ENGINE = "mesh_llm.engine.children.serve"
WORKER = "mesh_llm.engine.children.worker"
_SPARE_BYTES = 8 << 20
"""Address space beyond what a process has: the next larger allocation fails."""


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def children(pid: int, module: str) -> list[psutil.Process]:
    """Those of a node that run one of our modules."""
    found = []
    for process in descendants(pid):
        with suppress(psutil.Error):
            if module in process.cmdline():
                found.append(process)
    return found


def marked(mark: str) -> Iterator[psutil.Process]:
    """All that carry the mark of a run, whoever their parents are by now."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def orphans(mark: str) -> list[psutil.Process]:
    """Those that belong to nobody of this run any more."""
    ours = {process.pid for process in descendants(os.getpid())}
    return [process for process in marked(mark) if process.pid not in ours]


def pause(pid: int, *, family: bool) -> None:
    _signal(pid, signal.SIGSTOP, family=family)


def resume(pid: int, *, family: bool) -> None:
    _signal(pid, signal.SIGCONT, family=family)


def _signal(pid: int, number: signal.Signals, *, family: bool) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *(descendants(pid) if family else ())):
            signal_process(each, number)


def can_limit() -> bool:
    return sys.platform == "linux"


def limit_files(pid: int, *, full: bool) -> None:
    """Whether a process and its children can make any file longer: as on a disk that is full."""
    if sys.platform == "linux":
        import resource

        _limit(pid, resource.RLIMIT_FSIZE, 0 if full else resource.RLIM_INFINITY)


def limit_memory(process: psutil.Process, *, full: bool) -> None:
    if sys.platform == "linux":
        import resource

        with suppress(psutil.NoSuchProcess):
            size = process.memory_info().vms + _SPARE_BYTES
            _limit_one(process.pid, resource.RLIMIT_AS, size if full else resource.RLIM_INFINITY)


def _limit(pid: int, what: int, value: int) -> None:
    with suppress(psutil.NoSuchProcess):
        for each in (psutil.Process(pid), *descendants(pid)):
            _limit_one(each.pid, what, value)


def _limit_one(pid: int, what: int, value: int) -> None:
    if sys.platform == "linux":
        import resource

        # The soft limit alone: it can be lifted again.
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, what)
            resource.prlimit(pid, what, (value if hard < 0 else min(value, hard), hard))
