"""Which node a plan is said to have lost, and what it warns of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.host import plan_run
from mesh_llm.host.lane import Lane
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.types import DeclinedOp, NodeId
from tests.support.planning import plan_of, settings

NATIVE = Path(__file__).parents[2] / "native"
COMPLAINT = "the link to worker 77 is lost"


class Names:
    def name_of(self, node: NodeId) -> str:
        return str(node)


def run_of(monkeypatch: pytest.MonkeyPatch) -> PlanRun:
    monkeypatch.setattr(plan_run, "COMPLAINT_S", 0.05)
    anything: Any = None
    plan = plan_of((NodeId("one"), 0, 1), (NodeId("two"), 1, 2), (NodeId("three"), 2, 4))
    run = PlanRun(
        epoch=1,
        plan=plan,
        fingerprint=anything,
        settings=settings(),
        mesh=Names(),  # type: ignore[arg-type]
        data_links=anything,
        specify=anything,
        on_report=lambda run, report: None,
        log_file=Path("unused"),
    )
    return run


def tell(run: PlanRun, report: EngineReport) -> None:
    """As one of its engines that serves."""
    anything: Any = None
    lane = Lane(1, open_links=anything, specify=anything, on_report=anything)
    lane.is_ready = True
    run._on_engine(lane, report)


def report(**failed: str) -> EngineReport:
    return EngineReport(state=EngineState.READY, failed_links=failed)


@pytest.mark.parametrize(
    "complaint",
    [COMPLAINT, "the stage before it sent nothing", "it was given up, since MESH1 is gone"],
)
async def test_a_worker_that_lost_the_next_one_is_not_the_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, complaint: str
) -> None:
    run = run_of(monkeypatch)
    tell(run, report(MESH0=f"MESH0: {complaint}"))
    assert run.broken is None
    tell(run, report(MESH0=f"MESH0: {complaint}", MESH1="MESH1: the other side closed the link"))
    assert run.broken == "three was lost: the other side closed the link"


def test_complaints_are_in_native_words() -> None:
    said = "".join(path.read_text("utf-8") for path in NATIVE.glob("*/*.cpp"))
    assert [each for each in plan_run._COMPLAINTS if f'"{each}' not in said] == []


async def test_where_nobody_else_is_lost_the_one_that_complains_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch)
    tell(run, report(MESH0=f"MESH0: {COMPLAINT}"))
    async with asyncio.timeout(30):
        while run.broken is None:
            await asyncio.sleep(0.01)
    assert run.broken == f"two was lost: {COMPLAINT}"


def test_warns_of_ops_that_a_worker_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch)
    declined = (
        DeclinedOp(link="MESH1", op="SSM_SCAN", node="node_17", layers=2),
        DeclinedOp(link="MESH0", op="FLASH_ATTN_EXT", node="fattn-1", layers=1),
    )
    tell(run, EngineReport(state=EngineState.READY, declined=declined))
    assert run.warnings == (
        "three does not compute SSM_SCAN (node_17, 2 layers): "
        "the host does, in at least 4 more hops for each token",
        "two does not compute FLASH_ATTN_EXT (fattn-1, 1 layer): "
        "so the engine does without flash attention, on all nodes",
    )
