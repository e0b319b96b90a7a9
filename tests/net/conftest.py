"""An engine, a node that points to it, and the gateway in front of both; models at a peer's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from mesh_llm.gateway.server import Gateway, GatewayConfig
from tests.support import tiny_gguf
from tests.support.fetching import Model
from tests.support.file_peer import PIECE_BYTES
from tests.support.raw_http import RawClient, connect
from tests.support.upstream import FakeEngine, FakeNode, fake_engine

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """On the loop that a node runs on, and on the one whose behaviour is written down."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In every run the first loop alone: with the second it takes twice as long."""
    for item in items:
        if "[asyncio" in item.name:
            item.add_marker("full")


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


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "source").mkdir()
    path = tiny_gguf.write(tmp_path / "source" / "tiny.gguf", "llama", hidden=128)
    assert path.stat().st_size > 20 * PIECE_BYTES
    return Model([path], tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Model:
    (tmp_path / "source").mkdir()
    return Model(tiny_gguf.write_shards(tmp_path / "source" / "tiny.gguf", 3, "llama"), tmp_path)
