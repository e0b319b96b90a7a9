"""Networks in namespaces: who reaches whom, as plain sockets see it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from mesh_llm.engine.process import run, spawn
from tests.support import namespaces
from tests.support.namespaces import Host

PROBE = [sys.executable, "-P", str(Path(__file__).parents[1] / "support" / "probe.py")]
ANSWER_S = 30.0
"""For an answer that has to come, on a busy machine."""
SILENCE_S = 0.5
"""For one that must not come."""


@pytest.fixture(autouse=True)
async def built_here() -> AsyncIterator[None]:
    if (reason := await namespaces.unavailable()) is not None:
        pytest.skip(reason)
    yield
    assert [name for name in namespaces.existing() if _ours(name)] == []


def _ours(name: str) -> bool:
    return name.startswith(f"meshlab-{os.getpid()}-")


@asynccontextmanager
async def answering(hosts: Sequence[Host]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for host in hosts:
            lines = asyncio.Queue[str]()
            serving = spawn(host.command([*PROBE, "serve"]), on_stdout=lines.put_nowait, on_stderr=print)
            await stack.enter_async_context(serving)
            async with asyncio.timeout(ANSWER_S):
                assert await lines.get() == "ready"
        yield


async def ask(host: Host, address: str, within_s: float) -> dict[str, str]:
    """What `address` answers on each protocol: the address that it was asked from; "-" for silence."""
    finished = await run(host.command([*PROBE, "ask", address, str(within_s)]), timeout_s=60)
    assert finished.status == 0, finished.errors
    return dict(line.split(" ", 1) for line in finished.output)


async def reached(host: Host, address: str) -> dict[str, str]:
    return await ask(host, address, ANSWER_S)


async def unreached(host: Host, address: str) -> bool:
    return await ask(host, address, SILENCE_S) == {"tcp": "-", "udp": "-"}


async def reached_by_tcp_alone(host: Host, address: str) -> str:
    """Who asks, as `address` sees it over TCP; over UDP nothing may come, however often it is asked."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            answer = await ask(host, address, SILENCE_S)
            assert answer["udp"] == "-"
            # A busy machine may need longer for an answer than silence is listened to.
            if answer["tcp"] != "-":
                return answer["tcp"]


async def test_switch_everybody_reaches_everybody_and_nobody_else() -> None:
    async with namespaces.switch(3) as hosts, answering(hosts):
        assert [host.address for host in hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        for one in hosts:
            for other in hosts:
                assert await reached(one, other.address) == {"tcp": one.address, "udp": one.address}
        for outside in ("192.168.1.2", "8.8.8.8"):
            assert await unreached(hosts[0], outside)
        assert await reached(hosts[0], "127.0.0.1") == {"tcp": "127.0.0.1", "udp": "127.0.0.1"}


@pytest.mark.full
async def test_two_switches_are_apart() -> None:
    async with (
        namespaces.switch(1) as (one,),
        namespaces.switch(2) as (_, other),
        answering([other]),
    ):
        assert await unreached(one, other.address)


@pytest.mark.full
async def test_nat_lets_out_and_not_in() -> None:
    async with namespaces.nat() as net, answering([*net.public, *net.behind]):
        (public,), (behind,), (router,) = net.public, net.behind, net.routers

        assert await reached(behind, public.address) == {"tcp": router.address, "udp": router.address}
        assert await unreached(public, behind.address)
        assert await unreached(public, router.address)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.long
async def test_two_nats_meet_only_in_public(symmetric: bool) -> None:
    async with namespaces.two_nats(symmetric=symmetric) as net, answering([*net.public, *net.behind]):
        (public,), (one, other) = net.public, net.behind
        for host, router in zip(net.behind, net.routers, strict=True):
            assert await reached(host, public.address) == {"tcp": router.address, "udp": router.address}
        for host in net.behind:
            assert await unreached(public, host.address)
        assert await unreached(one, other.address)
        assert await unreached(one, net.routers[1].address)
        assert await unreached(other, one.address)


@pytest.mark.full
async def test_dropped_udp_leaves_tcp() -> None:
    async with namespaces.switch(2) as (one, other), answering([one, other]):
        await namespaces.drop_udp(one)
        assert await reached_by_tcp_alone(one, other.address) == one.address
        assert await reached_by_tcp_alone(other, one.address) == other.address
        assert await reached(one, "127.0.0.1") == {"tcp": "127.0.0.1", "udp": "127.0.0.1"}

        await namespaces.allow_udp(one)
        assert await reached(one, other.address) == {"tcp": one.address, "udp": one.address}


@pytest.mark.full
async def test_udp_dropped_by_a_router() -> None:
    async with namespaces.nat() as net, answering(net.public):
        await namespaces.drop_udp(net.routers[0])
        seen = await reached_by_tcp_alone(net.behind[0], net.public[0].address)

        assert seen == net.routers[0].address


async def test_a_pulled_cable_and_its_return_on_a_switch() -> None:
    async with namespaces.switch(3) as (one, two, three), answering([two, three]):
        await namespaces.link_down(two)
        assert await unreached(one, two.address)
        assert await reached(one, three.address) == {"tcp": one.address, "udp": one.address}

        await namespaces.link_up(two)
        assert await reached(one, two.address) == {"tcp": one.address, "udp": one.address}


@pytest.mark.full
async def test_a_pulled_cable_and_its_return_behind_a_nat() -> None:
    async with namespaces.nat() as net, answering(net.public):
        (public,), (behind,), (router,) = net.public, net.behind, net.routers
        for cable in (behind, router):
            await namespaces.link_down(cable)
            assert await unreached(behind, public.address)

            await namespaces.link_up(cable)
            assert await reached(behind, public.address) == {"tcp": router.address, "udp": router.address}


@pytest.mark.full
async def test_a_host_with_a_new_address() -> None:
    async with namespaces.switch(2) as (one, other), answering([one, other]):
        moved = await namespaces.renumber(one, "10.77.0.99")
        assert await reached(other, moved.address) == {"tcp": other.address, "udp": other.address}
        assert await reached(moved, other.address) == {"tcp": "10.77.0.99", "udp": "10.77.0.99"}
        assert await unreached(other, one.address)

    async with namespaces.nat() as net, answering(net.public):
        moved = await namespaces.renumber(net.behind[0], "192.168.1.77")
        router = net.routers[0].address
        assert await reached(moved, net.public[0].address) == {"tcp": router, "udp": router}


async def test_everything_goes_when_the_block_fails_or_is_cancelled() -> None:
    with pytest.raises(ZeroDivisionError):
        async with namespaces.switch(2):
            raise ZeroDivisionError

    standing = asyncio.Event()

    async def build() -> None:
        async with namespaces.two_nats():
            standing.set()
            await asyncio.Event().wait()

    building = asyncio.create_task(build())
    async with asyncio.timeout(ANSWER_S):
        await standing.wait()
    building.cancel()
    # Once more, while it tears down: that must not leave half of it.
    await asyncio.sleep(0)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    # The fixture looks for what is left.


async def test_what_a_dead_process_left_is_cleared_away() -> None:
    sleeper = await asyncio.create_subprocess_exec("true")
    await sleeper.wait()
    stale = f"meshlab-{sleeper.pid}-0-h1"
    assert (await run(["ip", "netns", "add", stale], timeout_s=ANSWER_S)).status == 0

    # Another process that builds networks may clear it away before this one, or at the same time.
    async with namespaces.switch(1), asyncio.timeout(ANSWER_S):
        while stale in namespaces.existing():
            await asyncio.sleep(0.01)
