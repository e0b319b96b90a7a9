"""The processes of a run: found by a mark in their environment, which every child inherits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

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


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """A process and its children cannot make any file longer: as on a disk that is full."""
    if sys.platform == "linux":
        import resource

        before = {each: _lower(each, resource.RLIMIT_FSIZE, 0) for each in _family(pid)}
        try:
            yield
        finally:
            # Those that were started meanwhile have inherited it.
            node = next(iter(before.values()), None)
            for each in {*before, *_family(pid)}:
                _put_back(each, resource.RLIMIT_FSIZE, before.get(each, node))


@contextmanager
def full_memory(found: Sequence[psutil.Process]) -> Iterator[None]:
    if sys.platform == "linux":
        import resource

        before = {}
        for each in found:
            with suppress(psutil.NoSuchProcess):
                size = each.memory_info().vms + _SPARE_BYTES
                before[each] = _lower(each, resource.RLIMIT_AS, size)
        try:
            yield
        finally:
            for each, soft in before.items():
                _put_back(each, resource.RLIMIT_AS, soft)


def _family(pid: int) -> list[psutil.Process]:
    """It comes first."""
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *descendants(pid)]
    return []


def _lower(process: psutil.Process, what: int, value: int) -> int | None:
    """The limit that it had. The soft one alone is changed: it can be put back."""
    if sys.platform == "linux":
        import resource

        with suppress(ProcessLookupError):
            soft, hard = resource.prlimit(process.pid, what)
            resource.prlimit(process.pid, what, (_least(value, soft, hard), hard))
            return soft
    return None


def _least(*limits: int) -> int:
    # "Unlimited" is a negative number.
    return min(limit for limit in limits if limit >= 0)


def _put_back(process: psutil.Process, what: int, soft: int | None) -> None:
    if sys.platform == "linux" and soft is not None and process.is_running():
        import resource

        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(process.pid, what)
            resource.prlimit(process.pid, what, (soft, hard))
