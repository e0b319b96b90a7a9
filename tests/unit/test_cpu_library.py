"""When a node may change to the CPU library that it has built, and which plans are out of date then."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from mesh_llm.node.cpu_library import CpuLibrary
from mesh_llm.types import NodeFacts, NodeId, Role

BUSY = {"taken": 1}


class Queue:
    waiting = 0

    def __init__(self, state: Mapping[str, int]) -> None:
        self._state = state

    @property
    def taken(self) -> int:
        return self._state.get("taken", 0)


def plan(**needs: int) -> Any:
    return SimpleNamespace(
        stages=[SimpleNamespace(node=NodeId(name), need_bytes=need) for name, need in needs.items()]
    )


def library(
    say: Mapping[str, str | None] = MappingProxyType({}),
    *,
    hosted: int = 0,
    lent: int = 0,
    nodes: int = 1,
    queue: Mapping[str, int] = MappingProxyType({}),
) -> CpuLibrary:
    """Of node `a`, which has 100 bytes of memory; `say`: which libraries members say they have."""

    def member(name: str) -> Any:
        value = say.get(name)
        return None if value is None else SimpleNamespace(facts=SimpleNamespace(cpu_library=value))

    facts = NodeFacts(name="a", role=Role.NODE, version="", memory_bytes=100)
    own_machine = SimpleNamespace(nodes=lambda: nodes)
    mesh: Any = SimpleNamespace(me=NodeId("a"), facts=facts, own_machine=own_machine, member=member)
    runs = [SimpleNamespace(plan=plan(a=hosted, b=1000))] if hosted else []
    unused: Any = None
    model: Any = (SimpleNamespace(runs=runs), Queue(queue))
    return CpuLibrary(
        unused,
        mesh=mesh,
        models=lambda: [model],
        lending=SimpleNamespace(lent_bytes=lent, leases=[1] if lent else []),  # type: ignore[arg-type]
        say=unused,
        progress=unused,
        take_up=unused,
    )


@pytest.mark.parametrize(
    ("state", "may"),
    [
        ({}, True),
        ({"hosted": 50, "queue": BUSY}, True),
        ({"hosted": 51, "queue": BUSY}, False),
        ({"hosted": 51}, True),
        ({"hosted": 40, "queue": BUSY, "nodes": 2}, False),
        ({"lent": 50}, True),
        ({"lent": 51}, False),
        ({"hosted": 30, "lent": 30}, False),
    ],
)
def test_old_and_new_side_by_side_or_nothing_to_disturb(state: dict[str, Any], may: bool) -> None:
    assert library(**state)._can_change() is may


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        ({"a": "", "b": "x"}, False),
        ({"a": "y", "b": "x"}, True),
        ({"a": "", "b": ""}, True),
        ({"a": "", "b": None}, False),
        ({"a": "", "b": "x", "c": "z"}, False),
    ],
    ids=["same", "host", "worker", "lost", "no part"],
)
def test_a_plan_is_out_of_date_when_a_node_of_it_changes(now: dict[str, str | None], differs: bool) -> None:
    said: dict[str, str | None] = {"a": "", "b": "x"}
    is_outdated = library(said).watch(plan(a=1, b=1))
    assert not is_outdated()

    said.update(now)

    assert is_outdated() is differs


def test_a_busy_host_without_room_is_left_alone_and_goes_through_with_what_it_began() -> None:
    said, state = {"a": ""}, {"taken": 1}
    is_outdated = library(said, hosted=60, queue=state).watch(plan(a=60))
    said["a"] = "x"

    seen = [is_outdated()]
    for taken in (0, 1):
        state["taken"] = taken
        seen.append(is_outdated())

    assert seen == [False, True, True]
