"""Engines one after the other, and the time that all of them have together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.engine_choice import GATEWAY_RESUME_TRIES, EngineChoice, EngineUntried
from mesh_llm.gateway.engine_connection import EngineLost
from mesh_llm.gateway.upstream import Upstream
from tests.support.upstream import FakeNode

LIMIT_S = 120.0
LOST = EngineLost("the connection was closed")


def engine(number: int) -> Upstream:
    return Upstream(url=f"http://127.0.0.1:{number}", key="")


class World:
    """A request whose engines, and whose clock, are the test's to move."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.loses_node = False
        self.gone: set[str] = set()
        """Engines whose plans have turned out to have lost a node."""
        self.node = FakeNode(where=self.engine(0))
        self.attempts = EngineChoice(self.node, limit_s=LIMIT_S, clock=lambda: self.now_s)

    def engine(self, number: int) -> Upstream:
        lost, url = self.loses_node, engine(number).url
        return replace(engine(number), lost_node=lambda: lost or url in self.gone)

    def left_s(self) -> float | None:
        return self.attempts.left_s

    async def lose(self, *, told: bool, after_s: float = 0.0, error: EngineLost = LOST) -> None:
        """The next engine takes the request on, and fails; another one stands ready."""
        upstream = await self.attempts.next()
        self.now_s += after_s
        self.attempts.failed(upstream, error, told=told)
        self.node.where = self.engine(self.attempts.count)


async def test_the_time_counts_over_all_tries() -> None:
    world = World()
    async with world.attempts as attempts:
        assert world.left_s() is None
        await world.lose(told=True, after_s=500)
        assert world.left_s() == LIMIT_S
        await world.lose(told=False, after_s=70)
        assert world.left_s() == LIMIT_S - 70
        await world.lose(told=False, after_s=50)
        assert world.left_s() == 0
        # A third one is there; the client has waited for long enough.
        with pytest.raises(ApiError) as failure:
            await attempts.next()
    assert failure.value.code == "not_resumed"
    assert failure.value.message == f"{world.node.sentence}; no other engine served within 120 s"


async def test_who_says_something_gives_the_next_loss_all_the_time_again() -> None:
    world = World()
    async with world.attempts:
        for _ in range(2 * GATEWAY_RESUME_TRIES):
            await world.lose(told=False, after_s=100)
            await world.lose(told=True, after_s=10)
            assert world.left_s() == LIMIT_S


async def test_an_engine_that_was_not_asked_is_no_try_and_no_new_beginning() -> None:
    world = World()
    untried = EngineUntried("the engine was replaced while the request waited for a slot")
    async with world.attempts as attempts:
        # Nothing is lost yet: it waits in the queue like everybody else.
        await world.lose(told=False, after_s=200, error=untried)
        assert world.left_s() is None
        for _ in range(GATEWAY_RESUME_TRIES - 1):
            await world.lose(told=False, after_s=10)
        await world.lose(told=False, after_s=10, error=untried)
        assert world.left_s() == LIMIT_S - 10 * (GATEWAY_RESUME_TRIES - 1)
        await world.lose(told=False, after_s=10)
        with pytest.raises(ApiError) as failure:
            await attempts.next()
    assert failure.value.code == "engine_lost"


async def test_an_engine_whose_plan_lost_a_node_did_not_die_of_the_request() -> None:
    world = World()
    async with world.attempts as attempts:
        for _ in range(2 * GATEWAY_RESUME_TRIES):
            world.loses_node = True
            await world.lose(told=False, after_s=1)
        world.loses_node = False
        for _ in range(GATEWAY_RESUME_TRIES):
            await world.lose(told=False, after_s=1)
        with pytest.raises(ApiError) as failure:
            await attempts.next()
    assert failure.value.code == "engine_lost"


async def test_that_a_node_was_lost_may_turn_out_after_the_answer_has_gone_on() -> None:
    """Who is killed is silent for a while before others know."""
    world = World()
    async with world.attempts as attempts:
        for _ in range(GATEWAY_RESUME_TRIES):
            await world.lose(told=False, after_s=1)
            await attempts.why()
        world.gone = {engine(1).url}
        await attempts.next()
