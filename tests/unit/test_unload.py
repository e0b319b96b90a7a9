"""Unloading at a user's word, and where that comes too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.node.unload import ModelUnload
from mesh_llm.types import State


@pytest.mark.parametrize("resting", [True, False])
async def test_a_node_that_leaves_lends_nothing_whatever_it_is_told(resting: bool) -> None:
    node: Any = SimpleNamespace(
        config=SimpleNamespace(client=False),
        hardware=object(),
        state=State.DRAINING,
        mesh=SimpleNamespace(facts=SimpleNamespace(resting=resting)),
        lending=SimpleNamespace(closed="this node is leaving"),
    )
    rest = ModelUnload(node)
    rest.begin()
    rest.end()
    await rest.close()

    assert node.lending.closed == "this node is leaving"
