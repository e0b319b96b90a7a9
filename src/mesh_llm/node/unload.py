"""The model out of this node's memory, at its user's word, until it is asked for again.

The node stays a member: its API goes on with what others serve, and it may host and lend
again at any time. Others see that it rests, plan without it, and take over first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mesh_llm.defaults import HAND_OVER_S, PLAN_DRAIN_S
from mesh_llm.errors import MeshError
from mesh_llm.node.announcements import Announcements
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import Event, NodeFacts, Role, State
from mesh_llm.worker.lending import Lending

UNLOADED = "the model was unloaded here"


def why_resting(facts: NodeFacts) -> str:
    return f"this node is paused: {facts.paused}" if facts.paused else UNLOADED


class ModelUnload:
    def __init__(
        self, mesh: Mesh, wake: Callable[[], None], lending: Lending, announcements: Announcements
    ) -> None:
        """`wake`: all that hosts are to look again at what should run."""
        self._mesh = mesh
        self._wake = wake
        self._lending = lending
        self._announcements = announcements
        self._releasing: asyncio.Task[None] | None = None

    @property
    def on(self) -> bool:
        return self._mesh.facts.resting

    def begin(self, paused: str = "") -> None:
        """Returns at once; the memory is free when answers under way are finished.

        `paused`: why, where it is to be used again without being loaded by hand.
        """
        if self._mesh.facts.role is Role.CLIENT:
            raise MeshError("a lite client holds no model")
        if self._mesh.facts.state is State.STARTING:
            raise MeshError("this node is still starting", hint="try again when it serves")
        if self._is_leaving() or (self.on and self._mesh.facts.paused == paused):
            return
        was_on = self.on
        self._mesh.publish(resting=True, paused=paused)
        self._lending.closed = why_resting(self._mesh.facts)
        if paused:
            self._announcements.say("paused", f"Paused: {paused}. Others take over what they can")
        else:
            self._announcements.note(Event(kind="unloaded", text="The model is being unloaded here"))
        if was_on:
            return
        self._wake()
        self._releasing = asyncio.create_task(self._release(), name="release of the worker")

    def end(self) -> None:
        if not self.on or self._is_leaving():
            return
        if self._releasing is not None:
            self._releasing.cancel()
        self._lending.closed = None
        if self._mesh.facts.paused:
            self._announcements.say("lending", "Lending again")
        else:
            self._announcements.note(Event(kind="loaded", text="The model may be loaded here again"))
        self._mesh.publish(resting=False, paused="")
        self._wake()

    def _is_leaving(self) -> bool:
        """Then it lends nothing any more, whatever its user wants of it."""
        return self._mesh.facts.state is State.DRAINING

    async def close(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.wait((self._releasing,))

    async def _release(self) -> None:
        """The worker keeps weights for the next lease, as long as it lives."""
        deadline = asyncio.get_running_loop().time() + HAND_OVER_S + PLAN_DRAIN_S
        # Hosts replace the plans in which this node works, and let their answers finish.
        while self._lending.leases and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)
        await self._lending.close()
