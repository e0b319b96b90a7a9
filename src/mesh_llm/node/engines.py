"""Which engines answer the requests of this node's API: its own, or other nodes' (gateway.upstream)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import EngineLoad, Health, ModelDetails, ModelServing, Upstream
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.node.announcements import Announcements
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.peers.remote_engine import RemoteEngine
from mesh_llm.types import Plan, State


class ModelEngines:
    """One model, as far as the gateway knows it (gateway.upstream.ModelServing)."""

    def __init__(
        self,
        node_name: str,
        plans: ModelPlans,
        remote: RemoteEngine,
        *,
        settings: Callable[[], ModelSettings | None],
        health: Callable[[], Health],
        details: Callable[[], ModelDetails],
        want: Callable[[], None],
        loses_node: Callable[[Plan], Callable[[], bool]],
    ) -> None:
        """`loses_node`: of a plan's nodes, from now on."""
        self._loses_node = loses_node
        self.details = details
        self.want = want
        self._node_name = node_name
        self._plans = plans
        self._remote = remote
        self._settings = settings
        self._health = health
        self.slot_queue: SlotQueue | None = None
        self.hosting: Hosting | None = None
        """None until the service is composed: a host is watched by whoever asks these engines."""

    @property
    def names(self) -> tuple[str, ...]:
        settings = self._settings()
        if settings is None:
            return (self._health().model or "",)
        return tuple(dict.fromkeys((settings.alias, settings.model)))

    def upstreams(self) -> list[Upstream]:
        assert self.hosting is not None
        run = self.hosting.serving
        takes_requests = run is not None and run.port is not None and run.broken is None
        here = [self._upstream_of(run)] if run is not None and takes_requests else []
        found = here + self._remote.upstreams()
        return found or [each for each in [self._replaced(self.hosting)] if each is not None]

    def upstream(self) -> Upstream | None:
        """The one here, or the first elsewhere."""
        return next(iter(self.upstreams()), None)

    def _replaced(self, hosting: Hosting) -> Upstream | None:
        """The engine here that was replaced by one elsewhere, until that one's host has answered."""
        useful = self._health().state is State.DRAINING or self._plans.serving() is not None
        run = hosting.last() if useful else None
        return self._upstream_of(run) if run is not None else None

    def leans_on(self, run: PlanRun) -> bool:
        """Whether requests go to this replaced engine until its successor can be reached from here."""
        upstream = None if self._health().state is State.DRAINING else self.upstream()
        return upstream is not None and upstream.url == run.engine_address()[0]

    def engine(self, epoch: int) -> Upstream | None:
        assert self.hosting is not None
        run = self.hosting.find(epoch)
        return self._upstream_of(run) if run is not None else None

    def _upstream_of(self, run: PlanRun) -> Upstream:
        url, key = run.engine_address()
        load = None
        if (turns := self.slot_queue) is not None:
            load = EngineLoad.of(run.plan, taken=turns.taken, waiting=turns.waiting, turn_s=turns.turn_s)
        return Upstream(
            url=url,
            key=key,
            served_by=self._node_name,
            predict=run.settings.predict,
            lanes=run.lanes.turns,
            load=load,
            lost_node=self._loses_node(run.plan),
        )

    async def look(self, digests: Sequence[str]) -> Mapping[str, str]:
        return await self._remote.look(digests)

    def health(self) -> Health:
        return self._health()

    async def engine_failure(self, upstream: Upstream) -> str:
        assert self.hosting is not None
        if upstream.connect is not None:
            return await self._remote.why(upstream)
        return await self.hosting.why(int(upstream.url.rsplit(":", 1)[1]))


class Engines:
    """The node, as far as the gateway knows it (gateway.upstream.Serving)."""

    def __init__(
        self,
        models: Callable[[], Sequence[ModelEngines]],
        every: Callable[[], Sequence[ModelEngines]],
        announcements: Announcements,
        *,
        metrics: Callable[[bytes], bytes],
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
    ) -> None:
        """`every`: also those that are being unloaded, and finish their answers."""
        self._models = models
        self._every = every
        self._announcements = announcements
        self._metrics = metrics
        self._load = load
        self._unload = unload

    def models(self) -> Sequence[ModelServing]:
        return self._models()

    def engine(self, epoch: int) -> Upstream | None:
        found = (model.engine(epoch) for model in self._every())
        return next((upstream for upstream in found if upstream is not None), None)

    def slot_queue(self, upstream: Upstream) -> SlotQueue | None:
        ports = {run.port: model for model in self._every() if model.hosting for run in model.hosting.runs}
        model = ports.get(int(upstream.url.rsplit(":", 1)[1]))
        return model.slot_queue if model is not None else None

    def slot_queues(self) -> Sequence[SlotQueue]:
        return tuple(model.slot_queue for model in self._models() if model.slot_queue is not None)

    async def load(self, name: str) -> None:
        await self._load(name)

    async def unload(self, name: str) -> None:
        await self._unload(name)

    def metrics(self, engine: bytes) -> bytes:
        return self._metrics(engine)

    def remark(self, kind: str, text: str) -> None:
        self._announcements.remark(kind, text)
