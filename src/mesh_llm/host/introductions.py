"""Links between neighbouring workers of a plan: activations need not come back to the host in between."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from itertools import pairwise
from typing import Any

from mesh_llm.defaults import LEASE_SILENCE_S
from mesh_llm.errors import MeshError
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import refusal
from mesh_llm.tasks import task_group
from mesh_llm.types import Place, Plan

log = logging.getLogger(__name__)


async def introduce(plan: Plan, epoch: int, mesh: Mesh) -> dict[Place, int | None]:
    """The number of each worker's link to the next one; None where they could not link up.

    The last worker is not in it: its results go to the host.
    """
    async with task_group() as group:
        tasks = {
            stage.place: group.create_task(_introduce_pair(stage.place, following.place, epoch, mesh))
            for stage, following in pairwise(plan.workers)
        }
    return {place: task.result() for place, task in tasks.items()}


async def _introduce_pair(place: Place, following: Place, epoch: int, mesh: Mesh) -> int | None:
    number = secrets.randbelow(1 << 31)
    header: dict[str, Any] = {"epoch": epoch, "next": following.node, "number": number}
    header |= {"device": place.device, "next_device": following.device}
    with suppress(MeshError, TimeoutError):
        async with asyncio.timeout(LEASE_SILENCE_S):
            stream = await mesh.open(place.node, "introduce", header)
            answer = await stream.read_document()
            await stream.finish()
            if answer.get("linked") is True:
                return number
            reason = refusal(answer, "it gave no reason")
            log.warning("workers not linked epoch=%d: %s", epoch, reason)
    return None
