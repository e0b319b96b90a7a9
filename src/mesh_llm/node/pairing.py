"""Lets a machine of the local network in by a code that the owner reads out."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from mesh_llm.errors import MeshError, UsageError
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.invites import Invites
from mesh_llm.pairing.announcement import fit_label
from mesh_llm.pairing.exchange import shown
from mesh_llm.pairing.offer import OPEN_S, Attempts, Offer
from mesh_llm.tasks import cancelled
from mesh_llm.types import Role

_ANNOUNCED_S = 20.0


class Pairing:
    """At most one offer at a time; the last one can be asked about after its end."""

    def __init__(
        self, name: str, invites: Invites, announcements: Announcements, *, bind_ip: str | None
    ) -> None:
        self._name = name
        self._invites = invites
        self._announcements = announcements
        self._bind_ip = bind_ip
        self._attempts = Attempts()
        self._offer: Offer | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def _is_open(self) -> bool:
        return self._running is not None and not self._running.done()

    async def begin(self, asked: dict[str, Any]) -> dict[str, Any]:
        """An offer under the name that the owner chose, or this node's; it takes the place of an open one."""
        label, role = asked.get("label") or self._name, asked.get("role", Role.NODE.value)
        if not isinstance(label, str) or role not in set(Role):
            raise UsageError("pairing is for an owner, a node or a client, under a name of your choice")
        if not self._attempts.left:
            raise MeshError(
                "there were ten wrong codes within an hour", hint="try again later, or make an invite token"
            )
        await self.close()
        self._invites.check(Role(role))
        self._offer = Offer(
            fit_label(label),
            attempts=self._attempts,
            make_token=lambda: self._token(Role(role)),
            bind_ip=self._bind_ip,
        )
        self._running = asyncio.create_task(self._run(self._offer), name="pairing")
        announced = asyncio.create_task(self._offer.announced.wait(), name="announcement")
        try:
            await asyncio.wait(
                (self._running, announced), timeout=_ANNOUNCED_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await cancelled(announced)
        if self._running.done():
            self._running.result()
        return self.state()

    def _token(self, role: Role) -> str:
        """Good for one machine, at once."""
        return str(self._invites.make(role, OPEN_S, limit=1)["token"])

    async def _run(self, offer: Offer) -> None:
        await offer.run()
        if offer.admitted is not None:
            self._announcements.say("paired", f"{offer.admitted} was let in by its code")

    def state(self) -> dict[str, Any]:
        """What the owner's screen shows."""
        offer = self._offer
        if offer is None:
            return {"open": False}
        arrived = offer.arrived
        return {
            "open": self._is_open,
            "label": offer.label,
            "code": shown(offer.code) if self._is_open else None,
            "expires": offer.expires,
            "attempts_left": self._attempts.left,
            "waiting": None
            if arrived is None
            else {"id": arrived.id, "name": arrived.name, "address": arrived.source},
            "admitted": offer.admitted,
        }

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The owner's decision about the machine that waits."""
        if self._offer is None or type(asked.get("accept")) is not bool:
            raise UsageError("say whether the machine that waits is to be let in")
        self._offer.decide(str(asked.get("id")), asked["accept"])
        return {"accepted": asked["accept"]}

    async def end(self) -> dict[str, Any]:
        await self.close()
        return self.state()

    async def close(self) -> None:
        if self._running is not None:
            await cancelled(self._running)
            with suppress(asyncio.CancelledError, MeshError):
                self._running.result()
