"""Runs the checks: side by side, each within its time, whatever one of them runs into."""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

from mesh_llm.doctor import machine, mesh, network, storage
from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding, Level, warning
from mesh_llm.doctor.thread import in_thread
from mesh_llm.errors import MeshError, UsageError

CHECK_S = 30.0
"""For each: starting the engine takes a second or two, a cold disk and a busy machine many more."""

Check = Callable[[CheckContext], Iterable[Finding] | Awaitable[Iterable[Finding]]]
"""A plain function runs in a thread of its own, so that it may wait for a disk or a network."""

CHECKS: tuple[Check, ...] = (
    machine.python,
    machine.command,
    machine.packages,
    machine.compiler,
    machine.engine,
    machine.gpus,
    machine.gpu_users,
    machine.memory,
    machine.limits,
    machine.clock,
    storage.home,
    storage.config,
    storage.disk,
    storage.models,
    network.ports,
    network.addresses,
    network.firewall,
    mesh.node,
    mesh.peers,
    mesh.relay,
    mesh.versions,
    mesh.clocks,
)
NAMES = tuple(check.__name__ for check in CHECKS)


async def examine(context: CheckContext, only: Collection[str] = ()) -> tuple[Finding, ...]:
    """All findings, in the order of the list; with `only`, those of the checks of these names."""
    if unknown := [name for name in only if name not in NAMES]:
        near = difflib.get_close_matches(unknown[0], NAMES, n=1)
        raise UsageError(
            f"there is no check {unknown[0]}",
            hint=f"did you mean {near[0]}?" if near else f"the checks are {', '.join(NAMES)}",
        )
    chosen = [check for check in CHECKS if not only or check.__name__ in only]
    found = await asyncio.gather(*(_run(check, context) for check in chosen))
    return tuple(finding for findings in found for finding in findings)


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.BROKEN, Level.WARNING) if level in levels), Level.OK)


async def _run(check: Check, context: CheckContext) -> list[Finding]:
    name = check.__name__
    try:
        async with asyncio.timeout(CHECK_S):
            if inspect.iscoroutinefunction(check):
                findings = await check(context)
            else:
                findings = await in_thread(lambda: list(check(context)))  # type: ignore[arg-type]
    except TimeoutError:
        findings = [_unknown(name, f"it did not answer within {CHECK_S:g} s")]
    except MeshError as error:
        findings = [_unknown(name, error.message, error.hint)]
    except Exception as error:
        # One check that fails must not keep the others from telling what they have found.
        findings = [_unknown(name, f"{type(error).__name__}: {error}")]
    return [replace(finding, check=name) for finding in findings]


def _unknown(check: str, why: str, hint: str | None = None) -> Finding:
    return warning(
        f"could not be checked: {why}",
        why="what this check looks for may be there",
        mend=hint or f"mesh-llm doctor {check} again; if that fails, too, report it (--report FILE)",
    )
