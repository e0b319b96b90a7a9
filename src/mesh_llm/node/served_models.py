"""The models that the mesh serves, and this node's service for each: the default one's always exists."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import HAND_OVER_S, PLAN_DRAIN_S
from mesh_llm.node.model_service import ModelService, NodeParts
from mesh_llm.tasks import cancelled
from mesh_llm.types import Fingerprint


class ServedModels:
    def __init__(self, parts: NodeParts, config: NodeConfig) -> None:
        self._parts = parts
        self._config = config
        settings = parts.joining.settings
        self.services: list[ModelService] = [
            ModelService(parts, config, settings.fingerprint if settings is not None else None)
        ]
        """In the order of the settings: the default one first."""
        self.ending: list[ModelService] = []
        """Of models that are no longer served, until their answers are finished."""
        self._tasks: dict[ModelService, list[asyncio.Task[None]]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._hosts = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def default(self) -> ModelService:
        return self.services[0]

    def every(self) -> Sequence[ModelService]:
        """Also those that are ending."""
        return (*self.services, *self.ending)

    def find(self, fingerprint: Fingerprint) -> ModelService | None:
        return next((each for each in self.services if each.plans.fingerprint == fingerprint), None)

    def wake(self) -> None:
        for service in self.services:
            service.wake()

    def on_decided(self) -> None:
        """The plan of one model is another one: what there is for the others has changed."""
        if len(self.services) > 1:
            self.wake()

    # -- life ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """From now on requests can be passed on to whoever serves."""
        for service in self.services:
            self._keep(service, service.follow(), "remote engine")

    async def run(self, *, hosts: bool) -> None:
        """Serve all models, until one of the node's own fails for good or this is cancelled."""
        self._hosts = hosts
        self.adopt()
        try:
            for service in self.services:
                self._host(service)
            await self._failed
        finally:
            await self.close()

    async def close(self) -> None:
        for task in (*self._ends, *(task for tasks in self._tasks.values() for task in tasks)):
            await cancelled(task)

    def adopt(self) -> None:
        """Bring the services in line with the settings: a model that stays is not touched."""
        settings = self._parts.mesh.settings()
        if settings is None:
            return
        wanted = [model.fingerprint for model in settings.models]
        default = self.default
        if self.find(wanted[0]) is None and default.plans.fingerprint not in wanted:
            # The new default takes the place of the old one, which serves until then.
            default.plans.fingerprint = wanted[0]
        before = {service.plans.fingerprint: service for service in self.services}
        if list(before) == wanted:
            return
        self.services = [before.get(fingerprint) or self._begin(fingerprint) for fingerprint in wanted]
        for service in before.values():
            if service not in self.services:
                self._end(service)
        self._parts.hosted.tell()

    def _begin(self, fingerprint: Fingerprint) -> ModelService:
        service = ModelService(self._parts, self._config.for_another_model(), fingerprint)
        self._keep(service, service.follow(), "remote engine")
        if self._hosts:
            self._host(service)
        return service

    def _host(self, service: ModelService) -> None:
        if self._hosts:
            self._keep(service, service.serve(), "model service")

    def _end(self, service: ModelService) -> None:
        self.ending.append(service)
        task = asyncio.create_task(self._ended(service), name="end of a model")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _ended(self, service: ModelService) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S + PLAN_DRAIN_S):
                    await service.hosting.close()
        finally:
            for task in self._tasks.pop(service, ()):
                await cancelled(task)
            service.plans.close()
            service.demand.close()
            self.ending.remove(service)

    def _keep(self, service: ModelService, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_done)
        self._tasks.setdefault(service, []).append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """What ends the work for one model ends the node: both have the same reasons."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)
