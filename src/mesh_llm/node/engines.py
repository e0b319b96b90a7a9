"""Which engine answers the requests of this node's API: its own, or another node's (gateway.upstream)."""

from __future__ import annotations

from collections.abc import Callable

from mesh_llm.gateway.upstream import EngineLoss, Health, Upstream
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.node.announcements import Announcements
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.remote_engine import RemoteEngine
from mesh_llm.types import State


class Engines:
    """The node, as far as the gateway knows it."""

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        announcements: Announcements,
        *,
        health: Callable[[], Health],
        metrics: Callable[[bytes], bytes],
    ) -> None:
        self._name = name
        self._mesh = mesh
        self._announcements = announcements
        self._health = health
        self._metrics = metrics
        self.hosting: Hosting | None = None
        self.remote: RemoteEngine | None = None
        """None until the node is composed: both are reached through the gateway, which needs this."""

    def upstream(self) -> Upstream | None:
        assert self.hosting is not None and self.remote is not None
        run = self.hosting.serving
        if run is not None and run.port is not None and run.broken is None:
            return self._upstream_of(run)
        return self.remote.upstream() or self._replaced(self.hosting)

    def _replaced(self, hosting: Hosting) -> Upstream | None:
        """The engine here that was replaced by one elsewhere, until that one's host has answered."""
        useful = self.health().state is State.DRAINING or self._mesh.serving() is not None
        run = hosting.last() if useful else None
        return self._upstream_of(run) if run is not None else None

    def leans_on(self, run: PlanRun) -> bool:
        """Whether requests go to this replaced engine until its successor can be reached from here."""
        upstream = None if self.health().state is State.DRAINING else self.upstream()
        return upstream is not None and upstream.url == run.engine_address()[0]

    def engine(self, epoch: int) -> Upstream | None:
        assert self.hosting is not None
        run = self.hosting.find(epoch)
        return self._upstream_of(run) if run is not None else None

    def _upstream_of(self, run: PlanRun) -> Upstream:
        url, key = run.engine_address()
        return Upstream(url=url, key=key, served_by=self._name, predict=run.settings.predict)

    def health(self) -> Health:
        return self._health()

    def metrics(self, engine: bytes) -> bytes:
        return self._metrics(engine)

    def remark(self, kind: str, text: str) -> None:
        self._announcements.remark(kind, text)

    async def engine_failure(self, upstream: Upstream) -> EngineLoss:
        assert self.hosting is not None and self.remote is not None
        if upstream.connect is not None:
            return await self.remote.why(upstream)
        return EngineLoss(sentence=await self.hosting.why(int(upstream.url.rsplit(":", 1)[1])))
