"""The engines of other nodes that serve a model, as this one's gateway uses them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mesh_llm.defaults import ENGINE_EXPLAIN_S
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.gateway.slot_queue import GATEWAY_TURN_GUESS_S
from mesh_llm.gateway.upstream import EngineLoad, SlotRequest, Upstream
from mesh_llm.membership.member import Published, Standing
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.members import loses_node
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.status_schema import LoadStatus, ServingStatus, from_document
from mesh_llm.types import NodeId, Plan, ServingPlan, Stage, State

REMOTE_ANSWER_S = 2.0
"""For a host to tell of its engine; `status` answers without it rather than late."""
REMOTE_LOOK_S = 0.5
"""For a host to tell how busy it is; a request goes without that rather than late."""
REMOTE_RETRY_S = 0.5
REMOTE_EXPLAIN_POLL_S = 0.1
REMOTE_REMEMBERED = 4
"""Engines of other nodes that requests may still hang on, beside those that serve."""
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
        self._known: dict[int, _Engine] = {}
        """Those that take requests, by which of the model's replicas they are."""
        self._told: dict[str, tuple[int, int, float]] = {}
        """By url, what hosts said last: turns that are taken, that are waited for, and how long one takes."""
        self._last: deque[_Engine] = deque(maxlen=REMOTE_REMEMBERED)
        """Those that requests may still hang on, for the sentence why one broke off."""

    def wake(self) -> None:
        published, known = self._published(), {(each.host, each.epoch): each for each in self._known.values()}
        for number, (host, serving) in published.items():
            # Under another number it is the same engine.
            if (engine := known.get((host, serving.epoch))) is not None:
                self._known[number] = engine
        self._known = {
            number: engine
            for number, engine in self._known.items()
            if number in published and self._is_present(engine.host)
        }
        self._wake.set()

    def _is_present(self, node: NodeId) -> bool:
        member = self._mesh.member(node)
        return member is not None and member.present

    async def run(self, on_change: Callable[[], None]) -> None:
        """Returns only by being cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REMOTE_RETRY_S if self._behind() else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._behind() and await self._learn():
                on_change()

    def upstreams(self) -> list[Upstream]:
        """The serving engines on other nodes, as far as their hosts have answered.

        One that was replaced serves until the host of its successor has answered: its own host lets it.
        """
        published = self._published()
        known = {each.url: each for number, each in sorted(self._known.items()) if number in published}
        # A host that has not been heard for a while may be dead: others come first.
        heard = [engine for engine in known.values() if self._is_heard(engine.host)]
        return [self._upstream(engine) for engine in heard or known.values()]

    def _is_heard(self, node: NodeId) -> bool:
        member = self._mesh.member(node)
        return member is not None and member.standing is Standing.ALIVE

    def _upstream(self, engine: _Engine) -> Upstream:
        settings = self._plans.settings()
        return Upstream(
            url=engine.url,
            served_by=self._mesh.name_of(engine.host),
            connect=partial(self._connect, engine.host, engine.epoch),
            predict=settings.predict if settings is not None else None,
            load=self._load(engine),
            lost_node=loses_node(self._mesh, engine.plan),
        )

    def _load(self, engine: _Engine) -> EngineLoad:
        taken, waiting, turn_s = self._told.get(engine.url, (0, 0, GATEWAY_TURN_GUESS_S))
        return EngineLoad.of(engine.plan, taken=taken, waiting=waiting, turn_s=turn_s)

    async def look(self, digests: Sequence[str]) -> dict[str, str]:
        """How busy hosts are, and which of these beginnings of a prompt each engine has read, by url."""
        engines = {each.url: each for each in self._known.values()}
        told = await asyncio.gather(*(self._look_at(each, digests) for each in engines.values()))
        self._told = {url: self._told[url] for url in engines if url in self._told}
        return dict(zip(engines, told, strict=True))

    async def _look_at(self, engine: _Engine, digests: Sequence[str]) -> str:
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(REMOTE_LOOK_S):
                document = await self._ask(engine.host, engine.epoch, beginnings=list(digests))
                told = from_document(LoadStatus, document.get("load"))
                self._told[engine.url] = told.taken, told.waiting, told.turn_s or GATEWAY_TURN_GUESS_S
                return told.read
        return ""

    async def why(self, upstream: Upstream) -> str:
        """Why a request to that engine broke off: who of its plan was lost, if anybody."""
        engine = next(
            (each for each in (*self._known.values(), *self._last) if each.url == upstream.url), None
        )
        if engine is None:
            return f"the connection to {upstream.served_by}, which hosts the model, broke"
        with suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_EXPLAIN_S):
                # Not for longer than until another one is there: the answer goes on then.
                while (lost := self._lost(engine.plan)) is None and all(
                    each is engine for each in self._known.values()
                ):
                    await asyncio.sleep(REMOTE_EXPLAIN_POLL_S)
                if lost is not None:
                    return self._loss(engine, lost)
        return f"the engine of {upstream.served_by} was lost"

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
        """Whom to ask about the model."""
        published = next(iter(self._published().values()), None)
        return (published[0], published[1].epoch) if published is not None else None

    def _published(self) -> dict[int, Published]:
        """What other nodes serve."""
        served = self._plans.replicas()
        return {number: each for number, each in served.items() if self._takes_requests(each[0])}

    def _takes_requests(self, host: NodeId) -> bool:
        member = self._mesh.member(host)
        if host == self._mesh.me or member is None or member.facts.state is State.DRAINING:
            return False
        # The state of a node is that of its default model.
        return member.facts.state is State.SERVING or not self._plans.is_default

    def _behind(self) -> dict[int, Published]:
        """Plans whose engines are not known yet."""
        known = {number: (engine.host, engine.epoch) for number, engine in self._known.items()}
        return {
            number: (host, serving)
            for number, (host, serving) in self._published().items()
            if known.get(number) != (host, serving.epoch)
        }

    async def _learn(self) -> bool:
        behind = self._behind()
        return any(await asyncio.gather(*(self._learn_of(number, *each) for number, each in behind.items())))

    async def _learn_of(self, number: int, host: NodeId, serving: ServingPlan) -> bool:
        try:
            async with asyncio.timeout(REMOTE_ANSWER_S):
                document = await self._ask(host, serving.epoch)
        except (MeshError, TimeoutError) as error:
            log.info("host does not answer node=%s: %r", host[:8], error)
            return False
        if document.get("epoch") != serving.epoch:
            return False
        engine = self._known[number] = _Engine(host=host, epoch=serving.epoch, plan=serving.plan)
        self._last.append(engine)
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
