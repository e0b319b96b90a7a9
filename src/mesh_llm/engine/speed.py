"""How fast this machine's devices are: measured once by a child, then remembered.

Each device has a file in a folder that the nodes of a machine share, named after all that its speed
depends on. Nodes that start together measure one after the other, as they would slow each other
down, and the second one finds what the first one wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeGuard

from mesh_llm.defaults import ENGINE_VERSION, MEASURE_ATTEMPTS
from mesh_llm.engine import inspect
from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.machine import available_memory, cpu_identity
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.types import Speed

MEASURE_WAIT_S = 120.0
"""For other nodes on this machine, which measure one at a time; a plan can do without a speed for so long."""
MEASURE_MEMORY_SHARE = 0.25
"""Of the main memory that is free: others may be about to load a model."""


log = logging.getLogger(__name__)

_RECORD_LIMIT_BYTES = 4096
_FIGURES = ("read_bytes_per_s", "flops_per_s", "attention_per_s")


async def measured_speed(
    libraries: Mapping[str, Path], device: str, threads: int, *, cache: Path
) -> Speed | None:
    """The speed of a device with so many threads; None, and a line in the log, where it cannot be had."""
    if "mesh" not in libraries:
        log.warning("speed not measured device=%s threads=%d cause=no libggml-mesh", device, threads)
        return None
    file = speed_file(libraries, device, threads, cache)
    record = before = _read(file)
    if before.is_settled:
        return before.speed
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with measuring_turn(cache):
            # What another node found while we waited is as good as what we would find now.
            record = _read(file)
            if record == before:
                record = await _measure(libraries, device, threads, before)
                _write(file, record)
    except (MeshError, OSError) as error:
        log.warning("speed not measured device=%s threads=%d cause=%s", device, threads, error)
    return record.speed


def known_speed(libraries: Mapping[str, Path], device: str, threads: int, *, cache: Path) -> Speed | None:
    """What was measured before; nothing is started."""
    return _read(speed_file(libraries, device, threads, cache)).speed


@frozen
class _Record:
    """What is known of one device."""

    speed: Speed | None = None
    """The best of all attempts."""
    attempts: int = 0
    is_sure: bool = False
    """Nobody disturbed the last one."""

    @property
    def is_settled(self) -> bool:
        return self.is_sure or self.attempts >= MEASURE_ATTEMPTS


async def _measure(libraries: Mapping[str, Path], device: str, threads: int, before: _Record) -> _Record:
    started = time.monotonic()
    attempts = before.attempts + 1
    try:
        found = await inspect.measure(libraries, device, threads=threads, memory_bytes=measuring_memory())
    except MeshError as error:
        log.warning(
            "speed not measured device=%s threads=%d attempt=%d cause=%s", device, threads, attempts, error
        )
        return replace(before, attempts=attempts)
    log.info(
        "speed measured device=%s threads=%d read_gb_s=%.1f gflop_s=%.0f attention_gflop_s=%.0f disturbed=%s"
        " took_s=%.1f",
        device,
        threads,
        found.speed.read_bytes_per_s / 1e9,
        found.speed.flops_per_s / 1e9,
        found.speed.attention_per_s / 1e9,
        found.disturbed,
        time.monotonic() - started,
    )
    return _Record(speed=_better(before.speed, found.speed), attempts=attempts, is_sure=not found.disturbed)


def _better(one: Speed | None, other: Speed) -> Speed:
    if one is None:
        return other
    return Speed(
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        flops_per_s=max(one.flops_per_s, other.flops_per_s),
        attention_per_s=max(one.attention_per_s, other.attention_per_s),
    )


def measuring_turn(cache: Path) -> AbstractAsyncContextManager[None]:
    """One at a time on this machine."""
    return file_lock(
        cache / "measuring.lock", waiting_for="measuring this machine's speed", timeout_s=MEASURE_WAIT_S
    )


def measuring_memory() -> int:
    return int(available_memory() * MEASURE_MEMORY_SHARE)


def speed_file(libraries: Mapping[str, Path], device: str, threads: int, cache: Path) -> Path:
    depends = [ENGINE_VERSION, cpu_identity(), device, str(threads)]
    depends += [f"{name} {path} {_identity(path)}" for name, path in sorted(libraries.items())]
    key = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]
    return cache / f"{re.sub('[^A-Za-z0-9]', '', device)[:32]}-{threads}-{key}.json"


def _identity(path: Path) -> str:
    """Changes when a library is built again; its contents may be half a gigabyte."""
    try:
        facts = path.stat()
    except OSError:
        return "missing"
    return f"{facts.st_size} {facts.st_mtime_ns}"


def _read(file: Path) -> _Record:
    """What a file says; nothing where it is missing or not ours."""
    try:
        with file.open("rb") as stream:
            document = json.loads(stream.read(_RECORD_LIMIT_BYTES))
    except (OSError, ValueError):
        return _Record()
    if not isinstance(document, dict):
        return _Record()
    speed, attempts = _speed(document.get("speed")), document.get("attempts")
    return _Record(
        speed=speed,
        attempts=attempts if isinstance(attempts, int) else 0,
        is_sure=speed is not None and document.get("is_sure") is True,
    )


def _speed(document: Any) -> Speed | None:
    if not isinstance(document, dict):
        return None
    figures = {name: figure for name in _FIGURES if is_positive(figure := document.get(name))}
    if len(figures) < len(_FIGURES):
        return None
    read, flops, attention = (figures[name] for name in _FIGURES)
    return Speed(read_bytes_per_s=read, flops_per_s=flops, attention_per_s=attention)


def is_positive(figure: Any) -> TypeGuard[float]:
    return isinstance(figure, float) and math.isfinite(figure) and figure > 0


def _write(file: Path, record: _Record) -> None:
    keep(file, asdict(record))


def keep(file: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all. Where it cannot be kept, the next start measures again."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(document) + "\n")
        scratch.replace(file)
    except OSError as error:
        log.warning("speed not kept file=%s cause=%s", file, error.strerror)
        with suppress(OSError):
            scratch.unlink()
