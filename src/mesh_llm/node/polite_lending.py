"""Lends while its user has no use for the machine (--lend), and pauses at the user's word.

Alone a node lends nothing: what it computes is for whoever sits at it, and --lend has no say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mesh_llm.config import LendTerms
from mesh_llm.local.lending_rules import LendingState, decided, why_not
from mesh_llm.local.machine_use import MachineUse, look
from mesh_llm.node.unload import ModelUnload
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import State

LOOK_S = 5.0
"""Between two looks at the machine: somebody who comes back waits as long for it at most."""
BY_HAND = "its user paused it"


class PoliteLending:
    def __init__(
        self,
        terms: LendTerms,
        mesh: Mesh,
        unload: ModelUnload,
        look: Callable[[], Awaitable[MachineUse]] = look,
    ) -> None:
        self._terms = terms
        self._mesh = mesh
        self._unload = unload
        self._look = look
        self._state = LendingState()
        self._by_hand = False

    async def run(self) -> None:
        """Returns at once where it is always lent; else only by being cancelled."""
        while self._terms != LendTerms():
            use = await self._look() if self._terms.idle else MachineUse()
            self._weigh(use, time.localtime(), now=asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    def _weigh(self, use: MachineUse, clock: time.struct_time, *, now: float) -> None:
        refusal = why_not(self._terms, use, 60 * clock.tm_hour + clock.tm_min)
        if not self._mesh.has_company():
            refusal, self._state = "", LendingState()
        self._state = decided(self._state, refusal, now=now)
        self._apply()

    def _apply(self) -> None:
        facts = self._mesh.facts
        if facts.state is State.STARTING or (facts.resting and not facts.paused):
            # Not yet equipped; or unloaded by hand, and loaded again in the same way.
            return
        if paused := BY_HAND if self._by_hand else self._state.paused:
            self._unload.begin(paused)
        elif facts.paused:
            self._unload.end()

    # -- at the user's word --------------------------------------------------------------------

    def pause(self) -> dict[str, Any]:
        """Until `resume`, or until the node is started again."""
        self._unload.begin(BY_HAND)
        self._by_hand = True
        return {"paused": self._mesh.facts.paused}

    def resume(self) -> dict[str, Any]:
        self.load()
        return {"paused": self._mesh.facts.paused}

    def load(self) -> None:
        """Whatever --lend says, until its reason is gone; also a model that was unloaded by hand."""
        self._by_hand = False
        self._state = LendingState(overruled=True)
        self._unload.end()
