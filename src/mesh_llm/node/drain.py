"""How a node goes: others take over what it did, answers under way finish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from mesh_llm.defaults import DRAIN_S, HAND_OVER_S
from mesh_llm.gateway.server import Gateway
from mesh_llm.host.hosting import Hosting
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import State
from mesh_llm.worker.lending import Lending


async def drain(mesh: Mesh, hosting: Sequence[Hosting], lending: Lending, gateway: Gateway) -> None:
    """After the node has said that it is draining; `hosting`: of each model."""
    lending.closed = "this node is leaving"
    mesh.publish(state=State.DRAINING, reason="the node is stopping")
    for each in hosting:
        each.wake()
    if mesh.has_company():
        deadline = asyncio.get_running_loop().time() + HAND_OVER_S
        # Ends with the plan of another host, or with nobody who could be one.
        while (
            any(each.serving is not None for each in hosting) and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.05)
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            drained = (each.ending.drained() for each in hosting)
            await asyncio.gather(gateway.drain(DRAIN_S), *drained, _returned(lending))


async def _returned(lending: Lending) -> None:
    """Until hosts have replaced the plans in which this node works, and finished their answers."""
    while lending.leases:
        await asyncio.sleep(0.05)
