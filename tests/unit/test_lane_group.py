"""Lanes of one plan: one that is lost is followed by another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mesh_llm.defaults import ENGINE_SETTLED_S
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.host import lane_group
from mesh_llm.host.lane import Lane
from mesh_llm.host.lane_group import LANE_RETRY_FIRST_S, LaneGroup
from mesh_llm.peers.data_links import Link
from mesh_llm.tasks import cancelled

WITHIN_S = 20.0


class FakeLane(Lane):
    """Ready at once, and lost when it is told to be."""

    lost: asyncio.Event

    async def live(self, on_ready: Callable[[Lane], None]) -> None:
        self.lost = asyncio.Event()
        self.is_ready = self.served = True
        on_ready(self)
        try:
            await self.lost.wait()
            raise RuntimeError("lost")
        finally:
            self.is_ready = False


async def test_a_lost_lane_is_replaced_however_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pause may end between two looks at the clock."""
    steps = count()
    clock = SimpleNamespace(monotonic=lambda: next(steps) * 0.6 * LANE_RETRY_FIRST_S)
    monkeypatch.setattr(lane_group, "time", clock)
    monkeypatch.setattr(lane_group, "Lane", FakeLane)
    group = LaneGroup(
        slots=1, wanted=2, routed=False, on_report=lambda lane, report: None, on_change=lambda: None
    )

    async def both() -> None:
        async with asyncio.timeout(WITHIN_S):
            while sum(lane.is_ready for lane in group.all) < 2:
                await asyncio.sleep(0.01)

    async def open_links(stack: object) -> list[Link]:
        return []

    keeping = asyncio.create_task(
        group.keep(open_links, lambda links: cast(EngineSpec, None), Path("log")), name="lanes"
    )
    try:
        await both()
        first = cast(FakeLane, group.all[0])
        first.lost.set()
        while first in group.all:
            await asyncio.sleep(0)
        await both()
    finally:
        await cancelled(keeping)


async def test_a_lane_that_ends_as_soon_as_it_is_ready_is_followed_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(lane_group, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(lane_group, "Lane", FakeLane)
    group = LaneGroup(
        slots=1, wanted=2, routed=False, on_report=lambda lane, report: None, on_change=lambda: None
    )

    async def until(ready: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while sum(lane.is_ready for lane in group.all) != ready or len(group.all) != ready:
                await asyncio.sleep(0)

    async def open_links(stack: object) -> list[Link]:
        return []

    keeping = asyncio.create_task(
        group.keep(open_links, lambda links: cast(EngineSpec, None), Path("log")), name="lanes"
    )
    pauses = []
    try:
        for lived_s in (0.1, 0.1, 0.1, ENGINE_SETTLED_S):
            await until(2)
            now += lived_s
            cast(FakeLane, group.all[-1]).lost.set()
            await until(1)
            pauses.append(group._not_before - now)
            now = group._not_before
            group.want(2)
    finally:
        await cancelled(keeping)

    assert [round(pause_s, 3) for pause_s in pauses] == [1, 2, 4, 1]
