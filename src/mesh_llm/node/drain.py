"""How a node goes: others take over what it did, answers under way finish."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from mesh_llm.defaults import DRAIN_S, HAND_OVER_S
from mesh_llm.types import State

if TYPE_CHECKING:
    from mesh_llm.gateway.server import Gateway
    from mesh_llm.node.node import Node


async def drain(node: Node, gateway: Gateway) -> None:
    """After it has said that it is draining."""
    node.lending.closed = "this node is leaving"
    node.mesh.publish(state=State.DRAINING, reason="the node is stopping")
    node.hosting.wake()
    if node.mesh.has_company():
        deadline = asyncio.get_running_loop().time() + HAND_OVER_S
        # Ends with the plan of another host, or with nobody who could be one.
        while node.hosting.serving is not None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(gateway.drain(DRAIN_S), node.hosting.drained(), _returned(node))


async def _returned(node: Node) -> None:
    """Until hosts have replaced the plans in which this node works, and finished their answers."""
    while node.lending.leases:
        await asyncio.sleep(0.05)
