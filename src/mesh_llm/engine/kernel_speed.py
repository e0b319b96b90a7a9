"""How fast this machine's devices are with what one model is made of: measured by a child, then remembered.

A file for each device beside the one with its speed, by the same name: what was measured of a type and
size for one model counts for every other one that has it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.defaults import MEASURE_ATTEMPTS
from mesh_llm.engine import inspect
from mesh_llm.engine.speed import is_positive, keep, measuring_memory, measuring_turn, speed_file
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.types import Kernel, KernelSpeed

log = logging.getLogger(__name__)

RETRY_S = 600.0
"""Before what was disturbed is measured again: nodes that start together are to agree."""
_KEPT = 256
"""Kernels of some thirty models; the oldest go first."""
_FILE_BYTES = 64 << 10


@frozen
class _Record:
    speed: KernelSpeed | None
    """None where this device has no such kernel."""
    attempts: int = 0
    is_sure: bool = False
    """Nobody disturbed the last one."""

    @property
    def is_settled(self) -> bool:
        return self.is_sure or self.attempts >= MEASURE_ATTEMPTS


async def measured_kernels(
    libraries: Mapping[str, Path], device: str, threads: int, kernels: Sequence[Kernel], *, cache: Path
) -> tuple[KernelSpeed, ...]:
    """Those of `kernels` that this device has; what cannot be measured is not among them."""
    file = _file(libraries, device, threads, cache)
    if not kernels or "mesh" not in libraries or not _missing(file, kernels):
        return _found(_read(file), kernels)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with measuring_turn(cache):
            # What another node found while we waited is as good as what we would find now.
            known = _read(file)
            if missing := _missing(file, kernels):
                await _measure(libraries, device, threads, missing, known)
                _write(file, known)
            return _found(known, kernels)
    except (MeshError, OSError) as error:
        log.warning("kernels not measured device=%s threads=%d cause=%s", device, threads, error)
    return _found(_read(file), kernels)


def known_kernels(
    libraries: Mapping[str, Path], device: str, threads: int, kernels: Sequence[Kernel], *, cache: Path
) -> tuple[KernelSpeed, ...]:
    """What was measured before; nothing is started."""
    return _found(_read(_file(libraries, device, threads, cache)), kernels)


def _file(libraries: Mapping[str, Path], device: str, threads: int, cache: Path) -> Path:
    return speed_file(libraries, device, threads, cache).with_suffix(".kernels.json")


def _missing(file: Path, kernels: Sequence[Kernel]) -> list[Kernel]:
    known, fresh = _read(file), _is_fresh(file)
    return [kernel for kernel in kernels if kernel not in known or not (fresh or known[kernel].is_settled)]


def _is_fresh(file: Path) -> bool:
    try:
        return abs(time.time() - file.stat().st_mtime) < RETRY_S
    except OSError:
        return False


def _found(known: Mapping[Kernel, _Record], kernels: Sequence[Kernel]) -> tuple[KernelSpeed, ...]:
    found = (known[kernel].speed for kernel in kernels if kernel in known)
    return tuple(speed for speed in found if speed is not None)


async def _measure(
    libraries: Mapping[str, Path],
    device: str,
    threads: int,
    missing: Sequence[Kernel],
    known: dict[Kernel, _Record],
) -> None:
    started = time.monotonic()
    measured = await inspect.measure_kernels(
        libraries, device, missing, threads=threads, memory_bytes=measuring_memory()
    )
    for kernel in missing:
        before = known.pop(kernel, _Record(speed=None))
        known[kernel] = replace(before, attempts=before.attempts + 1)
    for each in measured:
        before = known[each.speed.kernel]
        known[each.speed.kernel] = replace(
            before, speed=_better(before.speed, _short(each.speed)), is_sure=not each.disturbed
        )
    log.info(
        "kernels measured device=%s threads=%d count=%d of=%d disturbed=%d took_s=%.1f",
        device,
        threads,
        len(measured),
        len(missing),
        sum(each.disturbed for each in measured),
        time.monotonic() - started,
    )


def _short(speed: KernelSpeed) -> KernelSpeed:
    """Four digits: more would only make a node's facts longer."""
    return replace(
        speed,
        read_bytes_per_s=float(f"{speed.read_bytes_per_s:.4g}"),
        flops_per_s=float(f"{speed.flops_per_s:.4g}"),
    )


def _better(one: KernelSpeed | None, other: KernelSpeed) -> KernelSpeed:
    if one is None:
        return other
    return replace(
        one,
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        flops_per_s=max(one.flops_per_s, other.flops_per_s),
    )


def _read(file: Path) -> dict[Kernel, _Record]:
    """What a file says; nothing where it is missing or not ours."""
    try:
        with file.open("rb") as stream:
            document = json.loads(stream.read(_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    rows = document.get("kernels") if isinstance(document, dict) else None
    parsed = [_parsed(row) for row in rows] if isinstance(rows, list) else []
    return dict(each for each in parsed if each is not None)


def _parsed(row: Any) -> tuple[Kernel, _Record] | None:
    match row:
        case [
            str(kind),
            int(width),
            int(rows),
            int(experts),
            int(used),
            read,
            flops,
            int(attempts),
            bool(sure),
        ]:
            kernel = Kernel(kind=kind, width=width, rows=rows, experts=experts, used=used)
            speed = None
            if is_positive(read) and is_positive(flops):
                speed = KernelSpeed(kernel=kernel, read_bytes_per_s=read, flops_per_s=flops)
            return kernel, _Record(speed=speed, attempts=attempts, is_sure=sure and speed is not None)
    return None


def _write(file: Path, known: Mapping[Kernel, _Record]) -> None:
    rows = [
        [
            *(kernel.kind, kernel.width, kernel.rows, kernel.experts, kernel.used),
            record.speed.read_bytes_per_s if record.speed else None,
            record.speed.flops_per_s if record.speed else None,
            record.attempts,
            record.is_sure,
        ]
        for kernel, record in known.items()
    ]
    keep(file, {"kernels": rows[-_KEPT:]})
