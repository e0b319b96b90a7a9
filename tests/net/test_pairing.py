"""Offers and joiners on loopback, over real QUIC, without multicast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from spake2 import SPAKE2_A

from mesh_llm.errors import JoinRefused, MeshError
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.invites import Invites
from mesh_llm.node.pairing import Pairing
from mesh_llm.pairing import joiner
from mesh_llm.pairing import offer as offers
from mesh_llm.pairing.announcement import FoundMesh
from mesh_llm.pairing.exchange import ALPN
from mesh_llm.pairing.joiner import pair
from mesh_llm.pairing.offer import ATTEMPTS_AN_HOUR, Attempts, Offer
from mesh_llm.tasks import cancelled
from mesh_llm.transport.endpoint import NetworkConfig, bind, remote_address
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.types import Address, NodeId, Role

WITHIN_S = 30.0
TOKEN = "mesh1-of-this-mesh"


class Opened:
    def __init__(self, offer: Offer, found: FoundMesh, attempts: Attempts, ended: asyncio.Event) -> None:
        self.offer = offer
        self.found = found
        self.attempts = attempts
        self.ended = ended

    async def join(self, code: str | None = None) -> str:
        return await join(self.found, code or self.offer.code)

    async def arrival(self) -> offers.Arrived:
        async with asyncio.timeout(WITHIN_S):
            while self.offer.arrived is None:
                await asyncio.sleep(0.02)
        return self.offer.arrived

    @property
    def wrong(self) -> str:
        return f"{(int(self.offer.code) + 1) % 10**6:06}"


def told_here(monkeypatch: pytest.MonkeyPatch) -> dict[str, FoundMesh]:
    """What would be announced, without multicast."""
    told: dict[str, FoundMesh] = {}

    @contextlib.asynccontextmanager
    async def announced(label: str, node: NodeId, direct: Any, *, ip: str | None) -> AsyncIterator[str]:
        told["found"] = FoundMesh(label=label, node=node, address=Address(direct=tuple(direct)))
        yield label

    monkeypatch.setattr(offers, "announced", announced)
    return told


@contextlib.asynccontextmanager
async def opened(monkeypatch: pytest.MonkeyPatch, *, open_s: float = 60.0) -> AsyncIterator[Opened]:
    told = told_here(monkeypatch)
    attempts = Attempts()
    offer = Offer("Home", attempts=attempts, make_token=lambda: TOKEN, bind_ip="127.0.0.1", open_s=open_s)
    running, ended = asyncio.create_task(offer.run()), asyncio.Event()
    running.add_done_callback(lambda _: ended.set())
    try:
        async with asyncio.timeout(WITHIN_S):
            await offer.announced.wait()
        yield Opened(offer, told["found"], attempts, ended)
    finally:
        await cancelled(running)


@contextlib.asynccontextmanager
async def stranger(mesh: Opened) -> AsyncIterator[Any]:
    """A connection to the offer, for whatever is said on it."""
    config = NetworkConfig(
        identity=Identity.from_secret(secrets.token_bytes(32)), bind_ip="127.0.0.1", no_relay=True, alpn=ALPN
    )
    endpoint = await bind(config)
    try:
        yield await endpoint.connect(remote_address(mesh.found.node, mesh.found.address), ALPN)
    finally:
        await endpoint.close()


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


async def test_the_offer_is_over_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offers.OPEN_S == 600
    async with opened(monkeypatch, open_s=0.5) as mesh:
        async with asyncio.timeout(WITHIN_S):
            await mesh.ended.wait()
        assert mesh.offer.expires <= time.time()
        assert mesh.offer.admitted is None
        monkeypatch.setattr(joiner, "CONVERSATION_S", 1.0)
        with pytest.raises(JoinRefused, match=r"does not answer|no connection"):
            await mesh.join()


async def test_a_guess_counts_even_if_nobody_waits_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees that a guess is wrong could leave before it is counted."""
    async with opened(monkeypatch) as mesh, stranger(mesh) as connection:
        stream = await connection.open_bi()
        message = SPAKE2_A(mesh.wrong.encode()).start().hex()
        greeting = json.dumps({"version": 1, "name": "x", "pake": message}).encode()
        await stream.send().write_all(len(greeting).to_bytes(4, "big") + greeting)
        assert await stream.recv().read(64)
        connection.close(0, b"")
        assert mesh.attempts.left == ATTEMPTS_AN_HOUR - 1


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
        async with stranger(mesh) as connection:
            stream = await connection.open_bi()
            await stream.send().write_all(sent)
            await stream.send().finish()
            with contextlib.suppress(iroh().IrohError):
                async with asyncio.timeout(WITHIN_S):
                    assert TOKEN.encode() not in await stream.recv().read_to_end(4096)
        joining = asyncio.create_task(mesh.join())
        mesh.offer.decide((await mesh.arrival()).id, True)
        assert await joining == TOKEN


# -- what the owner's node shows --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pairing(made: list[tuple[Any, ...]], said: list[tuple[str, str]]) -> AsyncIterator[Pairing]:
    """Notes the invites that it makes, and what it says."""

    def make(*asked: Any, **more: Any) -> dict[str, str]:
        made.append((*asked, more))
        return {"token": TOKEN}

    invites = cast(Invites, SimpleNamespace(check=lambda role: None, make=make))
    announcements = cast(Announcements, SimpleNamespace(say=lambda *words: said.append(words)))
    pairing = Pairing("desk", invites, announcements, bind_ip="127.0.0.1")
    try:
        yield pairing
    finally:
        await pairing.close()


async def test_the_owner_sees_name_code_time_and_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_here(monkeypatch)
    made: list[tuple[Any, ...]] = []
    said: list[tuple[str, str]] = []
    async with pairing(made, said) as owner:
        assert owner.state() == {"open": False}
        shown = await owner.begin({"label": "Home office"})
        assert (shown["open"], shown["label"], shown["attempts_left"]) == (True, "Home office", 10)
        assert abs(shown["expires"] - time.time() - 600) < WITHIN_S
        assert told["found"].label == "Home office"
        joining = asyncio.create_task(join(told["found"], shown["code"]))
        async with asyncio.timeout(WITHIN_S):
            while (waiting := owner.state()["waiting"]) is None:
                await asyncio.sleep(0.02)
        assert (waiting["name"], waiting["address"]) == ("laptop", "127.0.0.1")
        assert made == []
        owner.answer({"id": waiting["id"], "accept": True})
        assert await joining == TOKEN
        async with asyncio.timeout(WITHIN_S):
            while (after := owner.state())["open"]:
                await asyncio.sleep(0.02)
        assert (after["code"], after["admitted"], after["attempts_left"]) == (None, "laptop", 10)
    # For one machine, and for no longer than the offer would have been open.
    assert made == [(Role.NODE, 600, {"limit": 1})]
    assert said == [("paired", "laptop was let in by its code")]


async def test_a_new_code_brings_no_new_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_here(monkeypatch)
    async with pairing([], []) as owner:
        codes = set()
        for used in range(ATTEMPTS_AN_HOUR):
            shown = await owner.begin({})
            codes.add(shown["code"])
            assert (shown["label"], shown["attempts_left"]) == ("desk", ATTEMPTS_AN_HOUR - used)
            with pytest.raises(JoinRefused, match="the code is wrong"):
                await join(told["found"], "000000" if shown["code"] != "000 000" else "000001")
        assert len(codes) > 1
        with pytest.raises(MeshError, match="ten wrong codes within an hour"):
            await owner.begin({})


async def join(found: FoundMesh, code: str) -> str:
    code = code.replace(" ", "")
    return await pair(found, code=code, name="laptop", bind_ip="127.0.0.1", on_proven=lambda: None)
