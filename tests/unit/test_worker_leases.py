"""How long a host waits for workers that bring their layers into memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from itertools import count
from typing import Any, cast

import pytest

from mesh_llm.host import worker_leases
from mesh_llm.host.worker_leases import Headway, StageLost, WorkerLeases
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import Fingerprint, NodeId
from tests.support.planning import GB, plan_of


def headway() -> Headway:
    return Headway(need_bytes=100 * GB, fetch_bytes=100 * GB, since_s=0.0)


def test_a_slow_worker_has_time_for_every_part() -> None:
    worker = headway()
    for part in range(1, 1001):
        assert worker.within_s(part * GB // 10, fetches=True, now=600.0 * part) > 0
    for part in range(1, 101):
        assert worker.within_s(part * GB, fetches=False, now=600_000.0 + 250.0 * part) > 0


@pytest.mark.parametrize(("fetches", "within_s"), [(True, 901), (False, 301)])
def test_a_worker_that_only_talks_has_not(fetches: bool, within_s: float) -> None:
    worker = headway()
    for done, now in enumerate(range(0, int(within_s), 10)):
        assert worker.within_s(done, fetches=fetches, now=float(now)) >= 0
    assert worker.within_s(1000, fetches=fetches, now=within_s) < 0


def test_nobody_gets_more_time_by_fetching_again_or_by_larger_layers() -> None:
    worker = headway()
    worker.within_s(0, fetches=False, now=0.0)
    assert worker.within_s(0, fetches=True, now=301.0) < 0
    assert worker.within_s(200 * GB, fetches=False, now=302.0) > 0
    assert worker.within_s(900 * GB, fetches=False, now=603.0) < 0


def test_layers_of_several_devices_are_fetched_one_after_the_other() -> None:
    """Each fetch counts from nothing; whoever counts so all the time comes to an end."""
    worker, now = Headway(need_bytes=10 * GB, fetch_bytes=30 * GB, since_s=0.0), 0.0
    for _ in range(3):
        for done in range(0, 10 * GB, GB // 10):
            now += 600.0
            assert worker.within_s(done, fetches=True, now=now) > 0
    counts = (10 * GB * (turn % 2) for turn in range(2000))
    left_s = [worker.within_s(done, fetches=True, now=(now := now + 600.0)) for done in counts]
    assert left_s[-1] < 0


class Talker:
    """A lease on a worker that has always just begun."""

    def __init__(self) -> None:
        self.words = 0

    async def read_document(self) -> dict[str, Any]:
        self.words += 1
        return {"done_bytes": 0, "total_bytes": 1}

    async def finish(self) -> None:
        pass


async def test_a_plan_gives_up_a_worker_that_only_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_leases, "LEASE_LOADS_S", 3.0)
    seconds = count()
    talker = Talker()

    class OneWorker:
        def name_of(self, _node: NodeId) -> str:
            return "ben"

        async def open(self, *_: object) -> Talker:
            return talker

    plan = plan_of((NodeId("ann"), 0, 2), (NodeId("ben"), 2, 4))
    leases = WorkerLeases(
        epoch=1,
        fingerprint=Fingerprint("f"),
        adapters=(),
        mesh=cast(Mesh, OneWorker()),
        on_lost=lambda *_: None,
        clock=lambda: float(next(seconds)),
    )
    async with AsyncExitStack() as stack:
        with pytest.raises(StageLost, match="ben makes no progress with its layers"):
            await leases.take(plan, stack, lambda _: None)
    assert talker.words < 10
