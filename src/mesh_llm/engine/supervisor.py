"""The life of one engine child: started, watched, explained, restarted, ended.

Ready or dead, it is noticed by the same path: the child's own lines, the first
answer on its port, and its exit. One that is neither, and hangs, is asked for (`health_check`) and ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import field, replace
from enum import StrEnum
from pathlib import Path

from mesh_llm import file_stamp
from mesh_llm.defaults import (
    ENGINE_BACKOFF_FIRST_S,
    ENGINE_BACKOFF_LAST_S,
    ENGINE_EXPLAIN_S,
    ENGINE_HEALTHY_S,
    PLAN_READY_S,
)
from mesh_llm.engine.diagnostics import Cause, Death, buffer_bytes, explain, printable, redacted, sentence
from mesh_llm.engine.health_check import SILENCE_S, until_heard, until_silent
from mesh_llm.engine.log_file import LogFile
from mesh_llm.engine.machine import oom_kills
from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.telemetry import Flows, flows, paces
from mesh_llm.errors import EngineFailed
from mesh_llm.frozen import frozen
from mesh_llm.tasks import cancelled
from mesh_llm.types import DeclinedOp, SpeculationCounters, StageCounters

log = logging.getLogger(__name__)


class EngineState(StrEnum):
    NONE = "none"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@frozen
class EngineReport:
    """What can be told about the engine right now."""

    state: EngineState = EngineState.NONE
    reason: str = ""
    pid: int | None = None
    port: int | None = None
    ready_s: float = 0.0
    restarts: int = 0
    buffers: dict[str, int] = field(default_factory=dict)
    """Bytes by kind (model, KV, compute …), as the engine itself reports them."""
    failed_links: dict[str, str] = field(default_factory=dict)
    """Why a worker no longer works, by the link's name. The engine runs, and fails every request."""
    stages: dict[str, StageCounters] = field(default_factory=dict)
    """What the workers have done, by the link's name, as of a second ago."""
    paces: dict[str, StageCounters] = field(default_factory=dict)
    """The same over the last second in which they were at work."""
    flows: dict[str, Flows] = field(default_factory=dict)
    """What crossed their links in that second."""
    stages_at: float = 0.0
    """When that was told, by the monotonic clock."""
    declined: tuple[DeclinedOp, ...] = ()
    """Ops that workers leave to the host."""
    speculation: SpeculationCounters | None = None
    """What drafts have done; None before there were any."""


class EngineSupervisor:
    """Owns the engine child. `run` returns only by failing or being cancelled."""

    def __init__(self, spec: EngineSpec, log_file: Path, on_change: Callable[[EngineReport], None]) -> None:
        self.spec = spec
        self.report = EngineReport()
        self._log_file = log_file
        self._kept: LogFile | None = None
        self._on_change = on_change
        self._failed: str | None = None
        self._hung: str | None = None
        self._listens: asyncio.Future[int] | None = None
        """The port, once the child has said that it is ready there."""
        self._ready_at = 0.0
        self._death: asyncio.Future[Death] | None = None
        self._started = 0.0

    async def run(self) -> None:
        """Keep an engine running. Raises `EngineFailed` where no restart could help."""
        backoff = ENGINE_BACKOFF_FIRST_S
        was_ready = False
        while True:
            if (changed := file_stamp.changed(self.spec.stamps)) is not None:
                self._change(state=EngineState.FAILED, reason=changed, pid=None, port=None)
                raise EngineFailed(changed)
            death = await self._live_once()
            now, is_ready = time.monotonic(), self.report.state is EngineState.READY
            lived_s, well_s = now - self._started, now - self._ready_at if is_ready else 0.0
            was_ready = was_ready or is_ready
            log.warning("engine died cause=%s after_s=%.1f: %s", death.cause, lived_s, death.sentence)
            self._change(state=EngineState.FAILED, reason=death.sentence, pid=None, port=None)
            # With links: they ended with the child, and who made them has to make new ones.
            if death.hopeless or not was_ready or self.spec.links:
                raise EngineFailed(death.sentence, hint=f"its log: {self._log_file}")
            backoff = ENGINE_BACKOFF_FIRST_S if well_s > ENGINE_HEALTHY_S else backoff
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, ENGINE_BACKOFF_LAST_S)
            # Told with the next change: the death itself has been told already.
            self.report = replace(self.report, restarts=self.report.restarts + 1)

    async def why(self, port: int) -> str:
        """Why the engine on `port` broke off, once that is known; asked by the gateway."""
        death = self._death
        if death is not None and self.report.port == port:
            try:
                async with asyncio.timeout(ENGINE_EXPLAIN_S):
                    return (await asyncio.shield(death)).sentence
            except TimeoutError:
                return "the engine closed the connection"
        return self.report.reason or "the engine was restarted"

    async def _live_once(self) -> Death:
        self._failed = self._hung = None
        self._listens = asyncio.get_running_loop().create_future()
        self._death = asyncio.get_running_loop().create_future()
        self._started = time.monotonic()
        kills_before = oom_kills()
        self._change(
            state=EngineState.LOADING,
            reason="the model is loading",
            buffers={},
            failed_links={},
            stages={},
            paces={},
            flows={},
            stages_at=0.0,
            declined=(),
            speculation=None,
        )
        try:
            with closing(LogFile(self._log_file)) as kept:
                self._kept = kept
                async with spawn(
                    module(f"mesh_llm.engine.children.{'external' if self.spec.bin_dir else 'serve'}"),
                    on_stdout=self._on_event,
                    pass_fds=[link.fd for link in self.spec.links],
                    on_stderr=lambda line: self._on_log(line, kept),
                ) as child:
                    self._change(pid=child.pid)
                    await child.send(self.spec.to_line(), close=False)
                    watch = asyncio.create_task(
                        self._watch(child, self._listens), name=f"watch of {child.pid}"
                    )
                    try:
                        status = await child.wait()
                    finally:
                        await cancelled(watch)
            death = self._explain(child, status, oom_killed=oom_kills() > kills_before)
        except asyncio.CancelledError:
            stopped = Death(cause=Cause.STOPPED, sentence="the engine was stopped")
            self._death.set_result(stopped)
            self._change(state=EngineState.NONE, reason=stopped.sentence, pid=None, port=None)
            raise
        self._death.set_result(death)
        return death

    async def _watch(self, child: Child, listens: asyncio.Future[int]) -> None:
        """Takes a child for ready that answers; ends one that hangs, so that its death says so."""
        try:
            async with asyncio.timeout(PLAN_READY_S):
                port = await listens
                # Its word alone is not enough: one that ends right after it has not started.
                await until_heard(port)
        except TimeoutError:
            self._hung = f"the engine was not ready within {PLAN_READY_S:.0f} s"
        else:
            # What it has loaded may be neither the file before nor the one after.
            self._hung = file_stamp.changed(self.spec.stamps)
            if self._hung is None:
                self._on_ready(child, port)
                await until_silent(port)
                self._hung = f"the engine did not answer for {SILENCE_S:.0f} s, and was ended"
        child.signal_group(signal.SIGKILL)

    def _on_ready(self, child: Child, port: int) -> None:
        self._ready_at = time.monotonic()
        ready_s = self._ready_at - self._started
        log.info("engine ready port=%d pid=%d took_s=%.2f", port, child.pid, ready_s)
        self._change(state=EngineState.READY, reason="", port=port, ready_s=ready_s)

    def _explain(self, child: Child, status: int, *, oom_killed: bool) -> Death:
        if self._hung is not None:
            return Death(cause=Cause.SILENT, sentence=self._hung, evidence=tuple(child.recent)[-8:])
        if status > 0 and self.report.failed_links:
            causes = "; ".join(self.report.failed_links.values())
            return Death(cause=Cause.LINK, sentence=f"the engine cannot use its workers ({causes})")
        return explain(status=status, failed=self._failed, lines=tuple(child.recent), oom_killed=oom_killed)

    def _on_event(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            log.warning("engine wrote a line that is not JSON: %.200s", printable(line))
            return
        if event.get("event") == "ready":
            if self._listens is not None and not self._listens.done():
                self._listens.set_result(event["port"])
        elif event.get("event") == "failed":
            self._failed = sentence(event.get("cause"))
        elif event.get("event") == "link_failed":
            cause = sentence(event["cause"])
            log.warning("worker lost link=%s: %s", event["name"], cause)
            failed = {**self.report.failed_links, event["name"]: cause}
            self._change(failed_links=failed)
        elif event.get("event") == "features_off":
            for off in event["sentences"]:
                log.warning("engine feature missing: %s", sentence(off))
        elif event.get("event") == "declined":
            self.report = replace(self.report, declined=tuple(DeclinedOp(**op) for op in event["ops"]))
        elif event.get("event") == "stages":
            # No change of state: whoever wants the figures looks at the report.
            stages = {entry.pop("link"): StageCounters(**entry) for entry in event["stages"]}
            before, now = self.report, time.monotonic()
            self.report = replace(
                before,
                stages=stages,
                paces=paces(before.paces, before.stages, stages),
                flows=flows(before.flows, before.stages, stages, seconds=now - before.stages_at),
                stages_at=now,
            )
        elif event.pop("event", None) == "speculation":
            self.report = replace(self.report, speculation=SpeculationCounters(**event))

    def _on_log(self, line: str, kept: LogFile) -> None:
        kept.write(redacted(line))
        if found := buffer_bytes(line):
            kind, size = found
            buffers = {**self.report.buffers, kind: self.report.buffers.get(kind, 0) + size}
            self.report = replace(self.report, buffers=buffers)

    def log_text(self) -> str:
        """What the engine has logged so far."""
        if self._kept is not None:
            self._kept.flush()
        return self._log_file.read_text("utf-8", errors="replace")

    def _change(self, **fields: object) -> None:
        self.report = replace(self.report, **fields)  # type: ignore[arg-type]
        self._on_change(self.report)
