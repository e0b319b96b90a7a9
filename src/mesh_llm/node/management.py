"""What a node can be told and asked to do, by its page and its command line (console.routes)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_llm.report import what_if
from mesh_llm.types import Role

if TYPE_CHECKING:
    from mesh_llm.node.node import Node


class Management:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def status(self) -> dict[str, Any]:
        return await self._node.status()

    def stop(self, *, leave: bool = False) -> None:
        self._node.stop(leave=leave)

    def unload(self) -> None:
        self._node.rest.begin()

    def load(self) -> None:
        self._node.rest.end()

    async def plan(self, wishes: dict[str, Any]) -> dict[str, Any]:
        """What `mesh-llm plan` shows of a running node's mesh."""
        return await what_if.over_mesh(self._node, wishes)

    def snapshot(self) -> dict[str, Any]:
        """What every node brings, for verbs that ask whether something would fit."""
        return what_if.snapshot_document(self._node)

    def invite(self, role: Role, lifetime_s: float | None, limit: int | None = None) -> dict[str, Any]:
        return self._node.invites.make(role, lifetime_s, limit=limit)

    def promote(self, name: str) -> dict[str, Any]:
        return self._node.invites.promote(name)

    def invites(self) -> dict[str, Any]:
        return self._node.invites.listed()

    def revoke(self, id: str) -> dict[str, Any]:
        return self._node.invites.revoke(id)
