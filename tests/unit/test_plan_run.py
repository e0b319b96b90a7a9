"""Which node a plan is said to have lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.host import plan_run
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.types import Mode, NodeId, Plan, Stage

COMPLAINT = "the link to worker 77 is lost"


class Names:
    def name_of(self, node: NodeId) -> str:
        return str(node)


def stage(node: str, first: int, last: int) -> Stage:
    return Stage(
        node=NodeId(node), first=first, last=last, weight_bytes=1, need_bytes=1, share=(last - first) / 4
    )


def run_of(monkeypatch: pytest.MonkeyPatch) -> PlanRun:
    monkeypatch.setattr(plan_run, "COMPLAINT_S", 0.05)
    anything: Any = None
    plan = Plan(
        mode=Mode.SPLIT,
        host=NodeId("one"),
        stages=(stage("one", 0, 1), stage("two", 1, 2), stage("three", 2, 4)),
        context=512,
        slots=1,
        head_on_worker=False,
        need_bytes=1,
        have_bytes=1,
        predicted=None,
        excluded=(),
        reason="",
    )
    run = PlanRun(
        epoch=1,
        plan=plan,
        fingerprint=anything,
        settings=anything,
        mesh=Names(),  # type: ignore[arg-type]
        data_links=anything,
        specify=anything,
        on_report=lambda run, report: None,
        log_file=Path("unused"),
    )
    run.is_ready = True
    return run


def report(**failed: str) -> EngineReport:
    return EngineReport(state=EngineState.READY, failed_links=failed)


async def test_a_worker_that_lost_the_next_one_is_not_the_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(monkeypatch)
    run._on_engine(report(MESH0=COMPLAINT))
    assert run.broken is None
    run._on_engine(report(MESH0=COMPLAINT, MESH1="the other side closed the link"))
    assert run.broken == "three was lost: the other side closed the link"


async def test_where_nobody_else_is_lost_the_one_that_complains_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch)
    run._on_engine(report(MESH0=COMPLAINT))
    await asyncio.sleep(0.2)
    assert run.broken == f"two was lost: {COMPLAINT}"
