"""The CPU library, compiled while the node already answers with the engine's own CPU code.

When it is there, the node says so in its facts. Whoever hosts a plan with it brings that plan up
anew beside the old one, whose answers finish first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mesh_llm.config import NodeConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.host.hosting import Hosting
from mesh_llm.local.hardware import Hardware, finish
from mesh_llm.peers.mesh import Mesh
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.types import ModelFacts, NodeId, Plan, ProgressSink
from mesh_llm.worker.lending import Lending

LIBRARY_ROOM_POLL_S = 1.0
"""Between two looks at whether there is room for another engine, or nothing to disturb."""

_READY = "Engine: the library for this processor is ready"


class CpuLibrary:
    def __init__(
        self,
        config: NodeConfig,
        *,
        mesh: Mesh,
        models: Callable[[], Sequence[tuple[Hosting, SlotQueue]]],
        lending: Lending,
        say: Callable[[str], None],
        progress: ProgressSink,
        take_up: Callable[[Hardware], None],
    ) -> None:
        """`take_up` gets the hardware with the library, once that disturbs nobody."""
        self._config = config
        self._say = say
        self._progress = progress
        self._take_up = take_up
        self._mesh = mesh
        self._models = models
        self._lending = lending

    async def build(self, hardware: Hardware | None, model: ModelFacts | None) -> None:
        """Compile what this machine's hardware lacks, and have it used."""
        if hardware is None or not hardware.builds:
            return
        found = await finish(self._config, hardware, say=self._say, progress=self._progress, model=model)
        if found.cpu_library and hardware.gpus:
            # Their memory has no room for the same layers twice, and their work is not the CPU's.
            self._say(f"{_READY}; this node uses it from its next start on")
            self._mesh.publish(builds=False)
            return
        while found.cpu_library and not self._can_change():
            await asyncio.sleep(LIBRARY_ROOM_POLL_S)
        self._take_up(found)
        if found.cpu_library:
            self._say(f"{_READY}; the next plan computes with it")
            self._lending.renew()
        self._mesh.publish(**found.facts())
        for hosting, _ in self._models():
            hosting.wake()

    def _can_change(self) -> bool:
        """Whether old and new fit side by side; else, whether nobody waits for what runs here."""
        models = self._models()
        hosted = [stage for hosting, _ in models for run in hosting.runs for stage in run.plan.stages]
        own = sum(stage.need_bytes for stage in hosted if stage.node == self._mesh.me)
        # Nodes of one machine build once, and change at the same time.
        room = usable_bytes(self._mesh.facts) // self._mesh.own_machine.nodes()
        if 2 * (own + self._lending.lent_bytes) <= room:
            return True
        return not self._lending.leases and not any(queue.taken or queue.waiting for _, queue in models)

    def watch(self, plan: Plan) -> Callable[[], bool]:
        """Tells whether a node of the plan has changed its library since now, and an engine here may be
        replaced for it. Once it may, that stays so: a replacement that was begun is brought to its end."""
        before, is_outdated = self._used_by(plan), False

        def look() -> bool:
            nonlocal is_outdated
            now = self._used_by(plan)
            differs = any(before.get(node, library) != library for node, library in now.items())
            is_outdated = is_outdated or (differs and self._can_change())
            return is_outdated

        return look

    def _used_by(self, plan: Plan) -> dict[NodeId, str]:
        """Which library each node of a plan computes with, as it says now; one that is lost says nothing."""
        members = {stage.node: self._mesh.member(stage.node) for stage in plan.stages}
        return {node: member.facts.cpu_library for node, member in members.items() if member is not None}
