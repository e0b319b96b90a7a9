"""What a node says of an engine elsewhere that broke off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.gateway.engine_request import small
from mesh_llm.gateway.upstream import Upstream
from mesh_llm.membership.member import Standing
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.peers.remote_engine import RemoteEngine
from mesh_llm.types import Fingerprint, NodeId, ServingPlan, State
from tests.support.planning import plan_of

HOST, WORKER, ME = NodeId("a" * 64), NodeId("b" * 64), NodeId("c" * 64)
NAMES = {HOST: "attic", WORKER: "cellar", ME: "me"}


class Stream:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    async def read_document(self, limit: int) -> dict[str, Any]:
        return self._document

    async def finish(self) -> None: ...


class TwoOthers:
    """A host and its worker, seen from a third node."""

    me = ME

    def __init__(self) -> None:
        self.present = {HOST, WORKER}
        self.state = State.SERVING
        self.epoch = 7

    def replicas(self, fingerprint: Fingerprint | None = None) -> dict[int, tuple[NodeId, ServingPlan]]:
        plan = plan_of((HOST, 0, 15), (WORKER, 15, 30))
        return {0: (HOST, ServingPlan(epoch=self.epoch, plan=plan, settings_version=1))}

    def member(self, node: NodeId) -> Any:
        standing = Standing.ALIVE if node in self.present else Standing.DEAD
        facts = SimpleNamespace(state=self.state)
        return SimpleNamespace(present=node in self.present, standing=standing, facts=facts)

    def name_of(self, node: NodeId) -> str:
        return NAMES[node]

    def started(self, node: NodeId) -> int:
        return 1

    def settings(self) -> None:
        return None

    async def open(self, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        return Stream({"epoch": header["epoch"]})


class Asked:
    def __init__(self) -> None:
        self.mesh = TwoOthers()
        mesh = cast(Mesh, self.mesh)
        self.remote = RemoteEngine(
            mesh, cast(DataLinks, None), ModelPlans(HostedPlans(mesh, lambda: None), None)
        )

    async def until_known(self) -> Upstream:
        self.remote.wake()
        learnt = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.remote.run(learnt.set))
            async with asyncio.timeout(20):
                await learnt.wait()
            task.cancel()
        (upstream,) = self.remote.upstreams()
        return upstream


@pytest.fixture
def asked() -> Asked:
    return Asked()


async def test_there_is_no_key_to_an_engine_elsewhere(asked: Asked) -> None:
    upstream = await asked.until_known()

    assert (upstream.key, upstream.served_by) == ("", "attic")
    assert b"Authorization" not in small("GET", "/v1/models").head(upstream, {})


async def test_a_lost_worker_is_named_with_its_layers(asked: Asked) -> None:
    upstream = await asked.until_known()
    assert not upstream.lost_node()
    asked.mesh.present.remove(WORKER)
    assert upstream.lost_node()

    assert await asked.remote.why(upstream) == "cellar, with layers 15–29, was lost"


async def test_a_lost_host_is_named_as_such(asked: Asked) -> None:
    upstream = await asked.until_known()
    asked.mesh.present.remove(HOST)

    assert await asked.remote.why(upstream) == "attic, which hosts the model, was lost"


async def test_who_was_lost_may_be_known_a_little_later(asked: Asked) -> None:
    upstream = await asked.until_known()
    asyncio.get_running_loop().call_later(0.3, asked.mesh.present.remove, WORKER)

    assert await asked.remote.why(upstream) == "cellar, with layers 15–29, was lost"


async def test_where_nobody_is_missing_it_was_the_engine(asked: Asked) -> None:
    upstream = await asked.until_known()

    assert await asked.remote.why(upstream) == "the engine of attic was lost"


async def test_the_answer_does_not_wait_for_a_reason_once_it_can_go_on(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_llm.peers.remote_engine.ENGINE_EXPLAIN_S", 1000)
    upstream = await asked.until_known()
    asked.mesh.epoch = 8
    await asked.until_known()

    async with asyncio.timeout(20):
        assert await asked.remote.why(upstream) == "the engine of attic was lost"


async def test_a_host_that_is_not_heard_comes_after_others(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of((WORKER, 0, 30))
    both = {**asked.mesh.replicas(), 1: (WORKER, ServingPlan(epoch=8, plan=plan, replica=1))}
    monkeypatch.setattr(asked.mesh, "replicas", lambda fingerprint=None: both)
    asked.remote.wake()
    task = asyncio.create_task(asked.remote.run(lambda: None))
    async with asyncio.timeout(20):
        while len(asked.remote.upstreams()) < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    assert [each.served_by for each in asked.remote.upstreams()] == ["attic", "cellar"]
    asked.mesh.present.remove(HOST)
    assert [each.served_by for each in asked.remote.upstreams()] == ["cellar"]
    # Under another number it is the same engine, and nobody has to be asked again.
    both[0] = both.pop(1)
    asked.remote.wake()
    assert [each.served_by for each in asked.remote.upstreams()] == ["cellar"]


async def test_an_engine_of_long_ago_is_not_remembered_for_ever(asked: Asked) -> None:
    upstream = await asked.until_known()
    for epoch in range(8, 14):
        asked.mesh.epoch = epoch
        await asked.until_known()

    assert await asked.remote.why(upstream) == "the connection to attic, which hosts the model, broke"
