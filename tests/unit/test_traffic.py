"""What crosses to a peer, its connection and its data links together."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from mesh_llm.defaults import ENGINE_STAGES_S
from mesh_llm.engine.supervisor import EngineSupervisor
from mesh_llm.host.lane import Lane
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.node.node import Node
from mesh_llm.peers.paths import Meter
from mesh_llm.report.status import _stage
from mesh_llm.report.traffic import crossing, traffic
from mesh_llm.status_schema import EngineStageStatus, Traffic
from mesh_llm.types import Place, StageCounters
from tests.support.composed import ANN, BEN, a_node, admit, open_doors
from tests.support.planning import plan_of, settings

HOST, ONE, TWO, OTHER = "host", "one", "two", "other"


def crossed(sent: int, received: int, rate: int = 100) -> Traffic:
    return Traffic(sent_bytes=sent, received_bytes=received, bytes_per_s=rate, peak_bytes_per_s=2 * rate)


def stage(node: str, *, link: str = "local", pushes: bool = True) -> EngineStageStatus:
    return EngineStageStatus(
        node=node,
        link=link,
        pushes=pushes,
        compute_ms=0.0,
        wait_ms=0.0,
        bytes_per_token=0,
        traffic=crossed(1000, 200),
        pushed=crossed(70, 0),
    )


STAGES = [stage(ONE), stage(TWO)]


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        (HOST, TWO, ("local", crossed(1000, 200))),
        (TWO, HOST, ("local", crossed(200, 1000))),
        (ONE, TWO, (None, crossed(70, 0))),
        (TWO, ONE, (None, crossed(0, 70))),
        (HOST, OTHER, None),
        (OTHER, ONE, None),
    ],
)
def test_each_side_sees_its_own_end(here: str, there: str, found: object) -> None:
    assert crossing(HOST, STAGES, here, there) == found


def test_workers_that_the_host_relays_for_have_no_link() -> None:
    assert crossing(HOST, [stage(ONE, pushes=False), stage(TWO)], ONE, TWO) is None
    assert crossing(None, [], ONE, TWO) is None


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = a_node(tmp_path)
    node.mesh.publish(machine="m1")
    admit(node, ANN, machine="m1")
    open_doors(monkeypatch, tmp_path, ANN)
    admit(node, BEN, machine="m2")
    for peer in (ANN, BEN):
        meter = node.mesh.paths._meters[peer] = Meter()
        meter.read(0, 0, now=1.0)
        meter.read(30, 20, now=2.0)
    return node


async def test_a_local_link_is_no_part_of_the_connection(node: Node) -> None:
    me = node.identity.id

    found = traffic(node.view, ANN, me, [stage(ANN)])

    assert found == Traffic(sent_bytes=1030, received_bytes=220, bytes_per_s=150, peak_bytes_per_s=200)


async def test_a_link_over_quic_has_been_counted_with_its_connection(node: Node) -> None:
    me = node.identity.id

    assert traffic(node.view, BEN, me, [stage(BEN, link="quic")]) == node.mesh.paths.traffic(BEN)
    assert traffic(node.view, BEN, me, []).bytes_per_s == 50


async def test_what_a_worker_knows_of_its_link_is_from_the_host(node: Node) -> None:
    me = node.identity.id

    found = traffic(node.view, ANN, ANN, [stage(me)])

    assert (found.sent_bytes, found.received_bytes, found.bytes_per_s) == (230, 1020, 150)


def counters(runs: int) -> StageCounters:
    sums = dict.fromkeys(StageCounters.__dataclass_fields__, 0)
    return replace(StageCounters(**sums), runs=runs, sent_bytes=1000 * runs, received_bytes=200 * runs)


def a_run(tmp_path: Path) -> PlanRun:
    """Of a plan with one worker, whose engine has said nothing yet."""
    nothing = cast(Any, None)
    run = PlanRun(
        epoch=1,
        plan=plan_of((BEN, 0, 1), (ANN, 1, 2)),
        fingerprint=nothing,
        settings=settings(),
        mesh=nothing,
        data_links=nothing,
        specify=nothing,
        on_report=nothing,
        log_file=tmp_path / "engine.log",
    )
    lane = Lane(1, open_links=nothing, specify=nothing, on_report=nothing)
    lane.supervisor = EngineSupervisor(nothing, tmp_path / "engine.log", lambda _: None)
    run.lanes.all.append(lane)
    return run


def test_the_engine_counts_what_crosses_and_an_idle_one_is_silent(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert run.supervisor is not None
    for runs in (10, 20):
        line = {"event": "stages", "stages": [{"link": "MESH0", **asdict(counters(runs))}]}
        run.supervisor._on_event(json.dumps(line))
    run.supervisor.report = replace(run.supervisor.report, stages_at=time.monotonic() + 60)

    told = _stage(run, Place(ANN)).traffic
    run.supervisor.report = replace(
        run.supervisor.report, stages_at=time.monotonic() - 2 * ENGINE_STAGES_S - 0.1
    )
    later = _stage(run, Place(ANN)).traffic

    assert (told.sent_bytes, told.received_bytes) == (20_000, 4000)
    assert told.bytes_per_s > 0
    assert later == replace(told, bytes_per_s=0)


@pytest.mark.parametrize("pushes", [{}, {Place(ANN): False}, {Place(ANN): True}])
def test_only_who_has_a_neighbour_pushes(pushes: dict[Place, bool], tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.pushes = pushes
    assert run.supervisor is not None
    line = {"link": "MESH0", **asdict(replace(counters(10), worker_out_bytes=2050))}
    run.supervisor._on_event(json.dumps({"event": "stages", "stages": [line]}))

    told = _stage(run, Place(ANN)).pushed

    assert told.sent_bytes == (50 if pushes.get(Place(ANN)) else 0)
    assert (told.peak_bytes_per_s > 0) is bool(pushes.get(Place(ANN)))
