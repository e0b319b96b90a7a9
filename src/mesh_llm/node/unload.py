"""The model out of this node's memory, at its user's word, until it is asked for again.

The node stays a member: its API goes on with what others serve, and it may host and lend
again at any time. Others see that it rests, plan without it, and take over first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh_llm.defaults import HAND_OVER_S, PLAN_DRAIN_S
from mesh_llm.errors import MeshError
from mesh_llm.types import Event, State

if TYPE_CHECKING:
    from mesh_llm.node.node import Node

UNLOADED = "the model was unloaded here"


class ModelUnload:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._releasing: asyncio.Task[None] | None = None

    @property
    def on(self) -> bool:
        return self._node.mesh.facts.resting

    def begin(self) -> None:
        """Returns at once; the memory is free when answers under way are finished."""
        node = self._node
        if node.config.client:
            raise MeshError("a lite client holds no model")
        if node.hardware is None:
            raise MeshError("this node is still starting", hint="try again when it serves")
        if self.on or self._is_leaving():
            return
        node.lending.closed = UNLOADED
        node.mesh.publish(resting=True)
        node.window.announcements.note(Event(kind="unloaded", text="The model is being unloaded here"))
        node.hosting.wake()
        self._releasing = asyncio.create_task(self._release(), name="release of the worker")

    def end(self) -> None:
        node = self._node
        if not self.on or self._is_leaving():
            return
        if self._releasing is not None:
            self._releasing.cancel()
        node.lending.closed = None
        node.mesh.publish(resting=False)
        node.window.announcements.note(Event(kind="loaded", text="The model may be loaded here again"))
        node.hosting.wake()

    def _is_leaving(self) -> bool:
        """Then it lends nothing any more, whatever its user wants of it."""
        return self._node.state is State.DRAINING

    async def close(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.wait((self._releasing,))

    async def _release(self) -> None:
        """The worker keeps weights for the next lease, as long as it lives."""
        deadline = asyncio.get_running_loop().time() + HAND_OVER_S + PLAN_DRAIN_S
        # Hosts replace the plans in which this node works, and let their answers finish.
        while self._node.lending.leases and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)
        await self._node.lending.close()
