"""How every measurement runs and ends: progress on stderr, Ctrl-C ends all that it started."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp

from mesh_llm.bench.facts import Load, load_text, machine_facts
from mesh_llm.errors import MeshError, UsageError

T = TypeVar("T")

_FOLDER = {"-o", "--output", "--out"}


def run_measurement(main: Coroutine[Any, Any, T]) -> T:
    """A signal ends everything that `main` started, as Ctrl-C does."""
    try:
        return asyncio.run(main)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise MeshError(
            f"a server did not answer: {error or type(error).__name__}",
            hint="the machine may be too busy; see `uptime`, and run it again",
        ) from error


class Facts:
    """Taken when a measurement starts and when it ends."""

    def __init__(self) -> None:
        self._load, self._began = Load.now(), time.monotonic()

    async def gather(self) -> dict[str, str]:
        took_s = time.monotonic() - self._began
        return {**await machine_facts(), "load average": load_text(self._load), "took": f"{took_s:.0f} s"}


def command(arguments: Sequence[str]) -> str:
    """As it was typed, but for the folder of the results, which changes none of them."""
    kept: list[str] = []
    for before, each in zip(("", *arguments), arguments, strict=False):
        if before in _FOLDER or each in _FOLDER or each.startswith(("--output=", "--out=")):
            continue
        kept.append(each)
    return shlex.join(["mesh-llm", *kept])


def numbers(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """`3,4,5`; with one sentence where they are none."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text}: give numbers, separated by commas") from None
