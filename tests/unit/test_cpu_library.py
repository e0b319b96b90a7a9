"""When a node may change to the CPU library that it has built, and which plans are out of date then."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from mesh_llm.node.cpu_library import CpuLibrary
from mesh_llm.types import NodeId, Plan


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
    taken: int = 0,
) -> CpuLibrary:
    """Of node `a`, which has 100 bytes of memory; `say`: which libraries members say they have."""
    members = {
        name: SimpleNamespace(facts=SimpleNamespace(cpu_library=value)) if value is not None else None
        for name, value in say.items()
    }
    mesh: Any = SimpleNamespace(
        me=NodeId("a"), own_memory_bytes=lambda: 100, nodes_here=lambda: nodes, member=members.get
    )
    runs = [SimpleNamespace(plan=plan(a=hosted, b=1000))] if hosted else []
    unused: Any = None
    return CpuLibrary(
        unused,
        mesh=mesh,
        hosting=SimpleNamespace(runs=runs),  # type: ignore[arg-type]
        lending=SimpleNamespace(lent_bytes=lent, leases=[1] if lent else []),  # type: ignore[arg-type]
        slot_queue=SimpleNamespace(taken=taken, waiting=0),  # type: ignore[arg-type]
        say=unused,
        progress=unused,
        take_up=unused,
    )


@pytest.mark.parametrize(
    ("state", "may"),
    [
        ({}, True),
        ({"hosted": 50, "taken": 1}, True),
        ({"hosted": 51, "taken": 1}, False),
        ({"hosted": 51}, True),
        ({"hosted": 40, "taken": 1, "nodes": 2}, False),
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
    asked: Plan = plan(a=1, b=1)
    before = library({"a": "", "b": "x"}).used_by(asked)

    assert library(now).differs(asked, before) is differs
