"""The engine of another node that serves a model, as this one's gateway uses it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from mesh_llm.defaults import ENGINE_EXPLAIN_S
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.gateway.upstream import EngineLoss, SlotRequest, Upstream
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.status_schema import ServingStatus, from_document
from mesh_llm.types import NodeId, Plan, ServingPlan, Stage, State

REMOTE_ANSWER_S = 2.0
"""For a host to tell of its engine; `status` answers without it rather than late."""
REMOTE_RETRY_S = 0.5
REMOTE_EXPLAIN_POLL_S = 0.1
REMOTE_REMEMBERED = 4
"""Engines of other nodes that requests may still hang on: the one that serves, and those it replaced."""
HISTORY_LIMIT_BYTES = 1 << 20
"""Of what a host tells of its engine and of the last minutes, over a hundred nodes."""


log = logging.getLogger(__name__)


@frozen
class _Engine:
    """The engine of a plan that another node published."""

    host: NodeId
    epoch: int
    plan: Plan

    @property
    def url(self) -> str:
        """A name for it: requests go over `connect`."""
        return f"http://{self.host[:16]}:{self.epoch}"


class RemoteEngine:
    """Follows whoever serves, and asks whether it takes requests."""

    def __init__(self, mesh: Mesh, data_links: DataLinks, plans: ModelPlans) -> None:
        self._mesh = mesh
        self._plans = plans
        self._data_links = data_links
        self._wake = asyncio.Event()
        self._known: _Engine | None = None
        self._last: deque[_Engine] = deque(maxlen=REMOTE_REMEMBERED)
        """Those that requests may still hang on, for the sentence why one broke off."""

    def wake(self) -> None:
        known = self._known
        if known is not None and (self._target() is None or not self._is_present(known.host)):
            self._known = None
        self._wake.set()

    def _is_present(self, node: NodeId) -> bool:
        member = self._mesh.member(node)
        return member is not None and member.present

    async def run(self, on_change: Callable[[], None]) -> None:
        """Returns only by being cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REMOTE_RETRY_S if self._is_behind() else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._is_behind() and await self._learn():
                on_change()

    def upstream(self) -> Upstream | None:
        """The serving engine on another node; None while there is none, or its host has not answered yet.

        One that was replaced serves until the host of its successor has answered: its own host lets it.
        """
        if self._known is None or self._target() is None:
            return None
        known, settings = self._known, self._plans.settings()
        return Upstream(
            url=known.url,
            served_by=self._mesh.name_of(known.host),
            connect=partial(self._connect, known.host, known.epoch),
            predict=settings.predict if settings is not None else None,
        )

    async def why(self, upstream: Upstream) -> EngineLoss:
        """Why a request to that engine broke off: who of its plan was lost, if anybody."""
        engine = next((each for each in self._last if each.url == upstream.url), None)
        if engine is None:
            return EngineLoss(
                sentence=f"the connection to {upstream.served_by}, which hosts the model, broke"
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_EXPLAIN_S):
                # Not for longer than until its successor is there: the answer goes on then.
                while (lost := self._lost(engine.plan)) is None and (
                    self._known is None or self._known is engine
                ):
                    await asyncio.sleep(REMOTE_EXPLAIN_POLL_S)
                if lost is not None:
                    return EngineLoss(sentence=self._loss(engine, lost), by_node=True)
        return EngineLoss(sentence=f"the engine of {upstream.served_by} was lost")

    def _lost(self, plan: Plan) -> Stage | None:
        return next((stage for stage in plan.stages if not self._is_present(stage.node)), None)

    def _loss(self, engine: _Engine, lost: Stage) -> str:
        name = self._mesh.name_of(lost.node)
        hosted = lost.node == engine.host
        part = "which hosts the model" if hosted else f"with layers {lost.first}–{lost.last - 1}"
        return f"{name}, {part}, was lost"

    async def about(self) -> ServingStatus | None:
        """What the host says of plan, model and engine; None where it does not answer in time."""
        target = self._target()
        if target is None:
            return None
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(REMOTE_ANSWER_S):
                document = await self._ask(*target)
                # Another epoch than the one asked for is one that has just ended.
                return from_document(ServingStatus, document) if document.get("epoch") == target[1] else None
        return None

    async def samples(self, since: float) -> list[Any]:
        """The host's points after that time, by its own clock; none where it does not answer in time."""
        target = self._target()
        if target is None:
            return []
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(REMOTE_ANSWER_S):
                told = (await self._ask(*target, samples_since=since)).get("samples")
                return told if isinstance(told, list) else []
        return []

    def _target(self) -> tuple[NodeId, int] | None:
        published = self._published()
        return (published[0], published[1].epoch) if published is not None else None

    def _published(self) -> tuple[NodeId, ServingPlan] | None:
        """What another node serves."""
        published = self._plans.serving()
        if published is None or published[0] == self._mesh.me:
            return None
        member = self._mesh.member(published[0])
        if member is None or member.facts.state is State.DRAINING:
            return None
        # The state of a node is that of its default model.
        return published if member.facts.state is State.SERVING or not self._plans.is_default else None

    def _is_behind(self) -> bool:
        target = self._target()
        return target is not None and (self._known is None or (self._known.host, self._known.epoch) != target)

    async def _learn(self) -> bool:
        published = self._published()
        if published is None:
            return False
        host, serving = published
        try:
            async with asyncio.timeout(REMOTE_ANSWER_S):
                document = await self._ask(host, serving.epoch)
        except (MeshError, TimeoutError) as error:
            log.info("host does not answer node=%s: %r", host[:8], error)
            return False
        if document.get("epoch") != serving.epoch:
            return False
        self._known = _Engine(host=host, epoch=serving.epoch, plan=serving.plan)
        self._last.append(self._known)
        return True

    async def _ask(self, host: NodeId, epoch: int, **more: Any) -> dict[str, Any]:
        stream = await self._mesh.open(host, "serving", {"epoch": epoch, **more})
        document = await stream.read_document(HISTORY_LIMIT_BYTES)
        await stream.finish()
        return document

    async def _connect(self, host: NodeId, epoch: int, turn: SlotRequest | None = None) -> socket.socket:
        try:
            return await self._data_links.http(host, epoch, turn)
        except MeshError as error:
            raise OSError(error.message) from error
