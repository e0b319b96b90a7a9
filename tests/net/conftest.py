"""An engine, a node that points to it, and the gateway in front of both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from mesh_llm.gateway.server import Gateway, GatewayConfig
from tests.support.raw_http import RawClient, connect
from tests.support.upstream import FakeEngine, FakeNode, fake_engine

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as engine:
        yield engine


@pytest.fixture
def node(engine: FakeEngine) -> FakeNode:
    return FakeNode(where=engine.upstream)


@pytest.fixture
async def start_gateway(node: FakeNode) -> AsyncIterator[StartGateway]:
    async with AsyncExitStack() as stack:

        async def start(config: GatewayConfig) -> Gateway:
            gateway = Gateway(config, node)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            return gateway

        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    return await start_gateway(GatewayConfig(port=0))


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[RawClient]:
    async with connect(gateway.port) as client:
        yield client
