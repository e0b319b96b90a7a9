"""Real iroh endpoints on loopback that know of each other only an id and the relay's URL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mesh_llm.relay.server import RelayConfig, RelayServer
from tests.support.iroh_peer import ask, bind, echo
from tests.support.relay_peer import relay, url

TOKEN = "a-token-for-tests"
WITHIN_S = 40.0
"""Endpoints wait some seconds before they try a lost relay again."""


@asynccontextmanager
async def endpoint(relay_url: str, **options: Any) -> AsyncIterator[Any]:
    bound = await bind("127.0.0.1", relay_url, **options)
    echoing = asyncio.create_task(echo(bound), name="echo")
    try:
        yield bound
    finally:
        await bound.close()
        async with asyncio.timeout(WITHIN_S):
            await echoing


def id_of(endpoint: Any) -> bytes:
    return bytes(endpoint.id().to_bytes())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def assert_meeting(one: Any, other: Any, server: RelayServer) -> None:
    """`one` finds `other` by its id, which only the relay can have told where to reach."""
    before = server.counters.delivered
    payload = os.urandom(50_000)
    async with asyncio.timeout(WITHIN_S):
        answer, paths = await ask(one, id_of(other), payload, relay=url(server), direct=[])
    assert answer == payload
    assert "relay" in paths
    assert server.counters.delivered > before


async def test_two_endpoints_meet() -> None:
    async with (
        relay(RelayConfig(token=TOKEN)) as server,
        endpoint(url(server), token=TOKEN) as one,
        endpoint(url(server), token=TOKEN) as other,
    ):
        await until(lambda: server.clients == {id_of(one), id_of(other)})
        await assert_meeting(one, other, server)
        assert server.counters.removed == {}
        assert server.counters.refused == {}
    await until(lambda: not server.clients)


async def test_a_wrong_token_keeps_an_endpoint_out() -> None:
    async with (
        relay(RelayConfig(token=TOKEN)) as server,
        endpoint(url(server), token=TOKEN) as member,
        endpoint(url(server), token="wrong") as outsider,
    ):
        await until(lambda: server.counters.refused["wrong token"] >= 3)
        await until(lambda: server.clients == {id_of(member)})
        asking = asyncio.create_task(
            ask(outsider, id_of(member), b"let me in", relay=url(server), direct=[]), name="outsider"
        )
        refused = server.counters.refused["wrong token"]
        await until(lambda: server.counters.refused["wrong token"] >= refused + 3)
        assert not asking.done()
        assert server.counters.frames == 0
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_an_endpoint_that_is_not_on_the_list_stays_out() -> None:
    secret = os.urandom(32)
    async with (
        relay(RelayConfig(allowed=frozenset())) as server,
        endpoint(url(server), secret=secret) as outsider,
    ):
        await until(lambda: server.counters.refused["not on the list"] >= 2)
        assert server.clients == frozenset()
        assert server.counters.refused == {"not on the list": server.counters.refused["not on the list"]}
        allowed = frozenset({id_of(outsider)})
        port = server.port
        await server.stop()
        async with relay(RelayConfig(allowed=allowed), port=port) as second:
            await until(lambda: second.clients == allowed)


async def test_the_relay_dies_and_comes_back() -> None:
    async with relay(RelayConfig(token=TOKEN)) as first:
        here = url(first)
        async with endpoint(here, token=TOKEN) as one, endpoint(here, token=TOKEN) as other:
            both = {id_of(one), id_of(other)}
            await until(lambda: first.clients == both)
            await first.stop()
            async with relay(RelayConfig(token=TOKEN), port=first.port) as second:
                await until(lambda: second.clients == both)
                await assert_meeting(one, other, second)


async def test_two_endpoints_with_one_id_do_not_throw_each_other_out() -> None:
    secret = os.urandom(32)
    async with relay() as server, endpoint(url(server)) as other, endpoint(url(server), secret=secret) as one:
        await until(lambda: server.clients == {id_of(one), id_of(other)})
        async with endpoint(url(server), secret=secret) as clone:
            await until(lambda: server.connections == 3)
            await assert_meeting(clone, other, server)
        await until(lambda: server.connections == 2)
        await assert_meeting(other, one, server)
        assert (server.counters.admitted, server.counters.replaced) == (3, 1)
