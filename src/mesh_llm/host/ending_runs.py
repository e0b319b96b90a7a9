"""Plans that were replaced or failed, until their engines have ended; answers under way finish first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress

from mesh_llm.defaults import PLAN_DRAIN_POLL_S, PLAN_DRAIN_S
from mesh_llm.engine.telemetry import engine_figures
from mesh_llm.host.plan_run import PlanRun

PLAN_DRAIN_LEAST_S = 1.0
"""That a replaced engine still takes requests: others hear of its successor within a few round trips."""


class EndingRuns:
    def __init__(self, *, is_needed: Callable[[PlanRun], bool], on_drained: Callable[[], None]) -> None:
        """`is_needed`: whether requests go to this replaced engine until its successor is reached."""
        self._is_needed = is_needed
        self._on_drained = on_drained
        self._drains: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self.draining: dict[int, PlanRun] = {}
        """By epoch: their engines finish the answers that they have begun."""

    def drain(self, run: PlanRun) -> None:
        """Let the answers of a replaced engine finish, then end it."""
        self.draining[run.epoch] = run
        _keep(self._drains, self._drain(run), f"drain of plan {run.epoch}")

    def end(self, run: PlanRun) -> None:
        """At once."""
        run.cancel()
        _keep(self._ends, run.ended(), f"end of plan {run.epoch}")

    async def drained(self) -> None:
        """Until the answers of replaced engines are finished."""
        while self.draining:
            await asyncio.sleep(PLAN_DRAIN_POLL_S)

    async def end_all(self, runs: Iterable[PlanRun]) -> None:
        """These and all that drain, now."""
        for task in self._drains:
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)
        for run in (*runs, *self.draining.values()):
            self.end(run)
        # Waited for and never cancelled: that would leave engines to nobody.
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _drain(self, run: PlanRun) -> None:
        try:
            # Other nodes have yet to hear of its successor, and send requests here until then.
            await asyncio.sleep(PLAN_DRAIN_LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PLAN_DRAIN_S):
                    while run.failure() is None and (self._is_needed(run) or await _is_busy(run)):
                        await asyncio.sleep(PLAN_DRAIN_POLL_S)
        finally:
            del self.draining[run.epoch]
            self.end(run)
            self._on_drained()


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None], name: str) -> None:
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _is_busy(run: PlanRun) -> bool:
    told = await asyncio.gather(*(engine_figures(*address) for address in run.lanes.addresses()))
    # One that is too busy to tell is busy.
    return any(
        not figures or figures.get("requests_processing", 0) + figures.get("requests_deferred", 0) > 0
        for figures in told
    )
