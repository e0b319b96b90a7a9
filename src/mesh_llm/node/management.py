"""What a node can be told and asked to do, by its page and its command line (console.routes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh_llm.node.invites import Invites
from mesh_llm.node.unload import ModelUnload
from mesh_llm.report import status, what_if
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import to_document
from mesh_llm.types import Role


class Management:
    def __init__(
        self, view: NodeView, invites: Invites, unload: ModelUnload, stop: Callable[[bool], None]
    ) -> None:
        """`stop` is told whether to leave the mesh, too."""
        self._view = view
        self._invites = invites
        self._unload = unload
        self._stop = stop

    async def status(self) -> dict[str, Any]:
        document: dict[str, Any] = to_document(await status.status(self._view))
        return document

    def stop(self, *, leave: bool = False) -> None:
        self._stop(leave)

    def unload(self) -> None:
        self._unload.begin()

    def load(self) -> None:
        self._unload.end()

    async def plan(self, wishes: dict[str, Any]) -> dict[str, Any]:
        """What `mesh-llm plan` shows of a running node's mesh."""
        return await what_if.over_mesh(self._view, wishes)

    def snapshot(self) -> dict[str, Any]:
        """What every node brings, for verbs that ask whether something would fit."""
        return what_if.snapshot_document(self._view)

    def invite(self, role: Role, lifetime_s: float | None, limit: int | None = None) -> dict[str, Any]:
        return self._invites.make(role, lifetime_s, limit=limit)

    def promote(self, name: str) -> dict[str, Any]:
        return self._invites.promote(name)

    def invites(self) -> dict[str, Any]:
        return self._invites.listed()

    def revoke(self, id: str) -> dict[str, Any]:
        return self._invites.revoke(id)
