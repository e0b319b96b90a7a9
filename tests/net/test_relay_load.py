"""Hundreds of clients at one relay."""

from __future__ import annotations

import asyncio

from bench.meshrelay import LOADS, WINDOW, connected, received, start, stop
from mesh_llm.relay.limits import RelayLimits
from mesh_llm.relay.server import RelayConfig
from tests.support.relay_peer import relay

CLIENTS = 250
MESSAGES = 12
WITHIN_S = 60.0


async def test_hundreds_of_clients_talk_at_once_and_nothing_is_lost() -> None:
    limits = RelayLimits(clients=CLIENTS, per_address=0)
    async with relay(RelayConfig(limits=limits)) as server, connected(server.port, CLIENTS) as clients:
        assert server.clients == {client.id for client in clients}
        for load in LOADS:
            before = [client.received for client in clients]
            start(clients, load)
            async with asyncio.timeout(WITHIN_S):
                while any(
                    client.received < count + MESSAGES for client, count in zip(clients, before, strict=True)
                ):
                    await asyncio.sleep(0.01)
            # Each message that is under way when nobody sends any more arrives once.
            in_all = received(clients) + CLIENTS * WINDOW
            await stop(clients)
            async with asyncio.timeout(WITHIN_S):
                while received(clients) < in_all:
                    await asyncio.sleep(0.01)
            assert received(clients) == in_all
        assert server.counters.dropped == {}
        assert received(clients) == server.counters.delivered == server.counters.frames
