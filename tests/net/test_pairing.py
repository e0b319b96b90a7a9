"""Offers and joiners on loopback, over real QUIC, without multicast."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh_llm.errors import JoinRefused
from mesh_llm.pairing import offer as offers
from mesh_llm.pairing.announcement import FoundMesh
from mesh_llm.pairing.exchange import ALPN
from mesh_llm.pairing.joiner import pair
from mesh_llm.pairing.offer import ATTEMPTS_AN_HOUR, Attempts, Offer
from mesh_llm.tasks import cancelled
from mesh_llm.transport.endpoint import NetworkConfig, bind, remote_address
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.types import Address, NodeId

WITHIN_S = 30.0
TOKEN = "mesh1-of-this-mesh"


class Opened:
    def __init__(self, offer: Offer, found: FoundMesh) -> None:
        self.offer = offer
        self.found = found

    async def join(self, code: str | None = None) -> str:
        return await pair(
            self.found,
            code=code or self.offer.code,
            name="laptop",
            bind_ip="127.0.0.1",
            on_proven=lambda: None,
        )

    async def arrival(self) -> offers.Arrived:
        async with asyncio.timeout(WITHIN_S):
            while self.offer.arrived is None:
                await asyncio.sleep(0.02)
        return self.offer.arrived

    @property
    def wrong(self) -> str:
        return f"{(int(self.offer.code) + 1) % 10**6:06}"


@contextlib.asynccontextmanager
async def opened(monkeypatch: pytest.MonkeyPatch, *, open_s: float = 60.0) -> AsyncIterator[Opened]:
    told: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def announced(label: str, node: NodeId, direct: Any, *, ip: str | None) -> AsyncIterator[str]:
        told["found"] = FoundMesh(label=label, node=node, address=Address(direct=tuple(direct)))
        yield label

    monkeypatch.setattr(offers, "announced", announced)
    offer = Offer("Home", attempts=Attempts(), make_token=lambda: TOKEN, bind_ip="127.0.0.1", open_s=open_s)
    running = asyncio.create_task(offer.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            await offer.announced.wait()
        yield Opened(offer, told["found"])
    finally:
        await cancelled(running)


async def test_the_owner_agrees_and_the_offer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(monkeypatch) as mesh:
        joining = asyncio.create_task(mesh.join())
        arrived = await mesh.arrival()
        assert (arrived.name, arrived.source) == ("laptop", "127.0.0.1")
        mesh.offer.decide(arrived.id, True)
        async with asyncio.timeout(WITHIN_S):
            assert await joining == TOKEN
            while mesh.offer.admitted is None:
                await asyncio.sleep(0.02)
        assert mesh.offer.admitted == "laptop"


async def test_a_guesser_gets_ten_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(monkeypatch) as mesh:
        for _ in range(ATTEMPTS_AN_HOUR):
            with pytest.raises(JoinRefused, match="the code is wrong"):
                await mesh.join(mesh.wrong)
        with pytest.raises(JoinRefused, match="ten wrong codes"):
            await mesh.join()
        assert mesh.offer.arrived is None


async def test_the_time_is_over_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(monkeypatch, open_s=3.0) as mesh:
        with pytest.raises(JoinRefused, match="did not agree"):
            await mesh.join()


async def test_a_machine_that_gives_up_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(monkeypatch) as mesh:
        joining = asyncio.create_task(mesh.join())
        await mesh.arrival()
        second = asyncio.create_task(mesh.join())
        with pytest.raises(JoinRefused, match="another machine is pairing"):
            await second
        await cancelled(joining)
        async with asyncio.timeout(WITHIN_S):
            while mesh.offer.arrived is not None:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x00\x00\x02{}",
        b"\xff\xff\xff\xff",
        b'\x00\x00\x00\x0d{"version":1}',
        b'\x00\x00\x00\x18{"version":1,"pake":"zz"}'[:28],
        b'\x00\x00\x00\x1b{"version":1,"pake":"4100"}',
    ],
)
async def test_garbage_ends_a_conversation_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    async with opened(monkeypatch) as mesh:
        config = NetworkConfig(
            identity=Identity.from_secret(secrets.token_bytes(32)),
            bind_ip="127.0.0.1",
            no_relay=True,
            alpn=ALPN,
        )
        endpoint = await bind(config)
        try:
            connection = await endpoint.connect(remote_address(mesh.found.node, mesh.found.address), ALPN)
            stream = await connection.open_bi()
            await stream.send().write_all(sent)
            await stream.send().finish()
            with contextlib.suppress(iroh().IrohError):
                async with asyncio.timeout(WITHIN_S):
                    assert TOKEN.encode() not in await stream.recv().read_to_end(4096)
        finally:
            await endpoint.close()
        joining = asyncio.create_task(mesh.join())
        mesh.offer.decide((await mesh.arrival()).id, True)
        assert await joining == TOKEN
