"""Unloading at a user's word, and where that comes too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.node.unload import ModelUnload
from mesh_llm.types import Role, State


@pytest.mark.parametrize("resting", [True, False])
async def test_a_node_that_leaves_lends_nothing_whatever_it_is_told(resting: bool) -> None:
    facts = SimpleNamespace(resting=resting, role=Role.NODE, state=State.DRAINING)
    mesh: Any = SimpleNamespace(facts=facts)
    lending: Any = SimpleNamespace(closed="this node is leaving")
    unused: Any = None
    unload = ModelUnload(mesh, unused, lending, unused)
    unload.begin()
    unload.end()
    await unload.close()

    assert lending.closed == "this node is leaving"
