"""Real iroh endpoints in networks of namespaces, with `mesh-llm relay` where they need one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.process import module, run, spawn
from tests.support import namespaces
from tests.support.namespaces import Host

PEER = [sys.executable, "-P", str(Path(__file__).parents[1] / "support" / "iroh_peer.py")]
TOKEN = {"MESH_LLM_RELAY_TOKEN": "across-the-nats"}
PORT = 3340
START_S = 30.0
PAYLOAD_BYTES = 100_000


@pytest.fixture(autouse=True)
async def built_here() -> None:
    if (reason := await namespaces.unavailable()) is not None:
        pytest.skip(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    id: str
    direct: tuple[str, ...]


@asynccontextmanager
async def relay_on(host: Host) -> AsyncIterator[str]:
    lines = asyncio.Queue[str]()
    argv = host.command([*module("mesh_llm"), "relay", "--listen", f"{host.address}:{PORT}"])
    url = f"http://{host.address}:{PORT}"
    async with spawn(argv, on_stdout=lines.put_nowait, on_stderr=print, env=TOKEN):
        async with asyncio.timeout(START_S):
            assert await lines.get() == f"Relay: {url}"
        yield url


@asynccontextmanager
async def answering(host: Host, relay: str | None) -> AsyncIterator[Answering]:
    lines = asyncio.Queue[str]()
    options = ["--relay", relay] if relay else []
    argv = host.command([*PEER, "answer", "0.0.0.0", *options])
    async with spawn(argv, on_stdout=lines.put_nowait, on_stderr=print, env=TOKEN):
        async with asyncio.timeout(START_S):
            said = json.loads(await lines.get())
        port = said["direct"][0].rpartition(":")[2]
        yield Answering(id=said["id"], direct=(f"{host.address}:{port}",))


async def ask(host: Host, peer: Answering, *, relay: str | None, direct: bool) -> Any:
    options = ["--relay", relay] if relay else []
    options += ["--direct", *peer.direct] if direct else []
    argv = host.command([*PEER, "ask", "0.0.0.0", peer.id, str(PAYLOAD_BYTES), *options])
    finished = await run(argv, timeout_s=60, env=TOKEN)
    assert finished.status == 0, finished.errors
    return json.loads(finished.output[-1])


async def test_one_behind_a_nat_reaches_out_without_a_relay() -> None:
    async with namespaces.nat() as net, answering(net.public[0], None) as peer:
        said = await ask(net.behind[0], peer, relay=None, direct=True)

    assert said == {"echoed": PAYLOAD_BYTES, "paths": ["direct"]}


async def test_two_behind_different_nats_meet_at_the_relay() -> None:
    async with (
        namespaces.two_nats() as net,
        relay_on(net.public[0]) as relay,
        answering(net.behind[0], relay) as peer,
    ):
        said = await ask(net.behind[1], peer, relay=relay, direct=False)

    assert said["echoed"] == PAYLOAD_BYTES
    assert "relay" in said["paths"]


async def test_two_behind_symmetric_nats_stay_on_the_relay() -> None:
    async with (
        namespaces.two_nats(symmetric=True) as net,
        relay_on(net.public[0]) as relay,
        answering(net.behind[0], relay) as peer,
    ):
        said = await ask(net.behind[1], peer, relay=relay, direct=True)

    assert said == {"echoed": PAYLOAD_BYTES, "paths": ["relay"]}


@pytest.mark.full
async def test_where_all_udp_is_dropped_the_relay_carries_everything_over_tcp() -> None:
    async with namespaces.switch(3) as (middle, one, other):
        for host in (middle, one, other):
            await namespaces.drop_udp(host)
        async with relay_on(middle) as relay, answering(one, relay) as peer:
            said = await ask(other, peer, relay=relay, direct=True)

    assert said == {"echoed": PAYLOAD_BYTES, "paths": ["relay"]}


@pytest.mark.full
async def test_routers_that_drop_udp_leave_the_relay() -> None:
    async with namespaces.two_nats() as net:
        for router in net.routers:
            await namespaces.drop_udp(router)
        async with relay_on(net.public[0]) as relay, answering(net.behind[0], relay) as peer:
            said = await ask(net.behind[1], peer, relay=relay, direct=False)

    assert said == {"echoed": PAYLOAD_BYTES, "paths": ["relay"]}
