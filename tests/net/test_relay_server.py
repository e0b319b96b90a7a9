"""The relay server: clients that behave, clients that do not, and real endpoints."""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from iroh.iroh_ffi import SecretKey

from mesh_llm.defaults import RELAY_PACKET_LIMIT_BYTES
from mesh_llm.gateway import ports
from mesh_llm.relay import protocol as protocol
from mesh_llm.relay.limits import RelayLimits
from mesh_llm.relay.metrics import NO_ROOM, UNKNOWN
from mesh_llm.relay.server import (
    RELAY_FRAME_LIMIT_BYTES,
    RELAY_MESSAGE_COST_BYTES,
    RELAY_SAME_ID,
    RelayConfig,
    RelayServer,
)
from tests.support.relay_peer import (
    ANSWER_S,
    RelayPeer,
    delivered,
    peer,
    relay,
    send_frame,
    stranger,
    url,
)

TOKEN = "a-token-for-tests"
DEAD_S = (1.0, 4.0, 12.0)
"""One after the other: a pause of the machine makes everybody silent; the next limit bears a longer one."""


@pytest.fixture
async def server() -> AsyncIterator[RelayServer]:
    async with relay() as started:
        yield started


async def until(condition: Callable[[], object], *, within_s: float = ANSWER_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def said_to(server: RelayServer, said: bytes) -> bytes:
    """All that the relay answers until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = b""
    writer.write(said)
    async with asyncio.timeout(ANSWER_S):
        with suppress(ConnectionResetError):
            while chunk := await reader.read(1 << 16):
                answer += chunk
    writer.close()
    return answer


async def assert_unharmed(server: RelayServer) -> None:
    """Two newcomers find everything as it should be."""
    async with peer(url(server)) as one, peer(url(server)) as other:
        await exchange(one, other)


async def exchange(one: RelayPeer, other: RelayPeer, datagram: bytes = b"hello") -> None:
    for source, destination in ((one, other), (other, one)):
        await source.send_to(destination, datagram)
        assert await destination.receive() == delivered(source.id, datagram)


# -- those who behave ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", protocol.VERSIONS)
async def test_datagrams_go_both_ways(server: RelayServer, version: str) -> None:
    async with (
        peer(url(server), version=version) as one,
        peer(url(server)) as other,
        peer(url(server)) as third,
    ):
        assert server.clients == {one.id, other.id, third.id}
        # The longest, one whose length takes two bytes, one whose length takes a single byte.
        for length in (RELAY_PACKET_LIMIT_BYTES - 33, 1200, 1):
            await exchange(one, other, b"d" * length)
        await one.send(b"\x05" + other.id + b"\x01\x00\x02aabbc")
        assert await other.receive() == b"\x07" + one.id + b"\x01\x00\x02aabbc"
        # Nothing of it was for the third.
        await exchange(one, third)
    await until(lambda: not server.clients)
    assert server.counters.delivered == server.counters.frames == 9


async def test_order_is_kept(server: RelayServer) -> None:
    async with peer(url(server)) as one, peer(url(server)) as other:
        for number in range(300):
            await one.send_to(other, b"%d" % number)
        for number in range(300):
            assert await other.receive() == delivered(one.id, b"%d" % number)


async def test_a_datagram_for_nobody_is_dropped(server: RelayServer) -> None:
    async with peer(url(server)) as one, peer(url(server)) as other:
        await one.send(send_frame(bytes(32), b"lost"))
        await exchange(one, other)

    assert server.counters.dropped == {UNKNOWN: 1}


async def test_ping_is_answered(server: RelayServer) -> None:
    async with peer(url(server)) as one:
        await one.send(protocol.ping(b"12345678"))
        assert await one.receive() == protocol.pong(b"12345678")


async def test_those_who_talked_with_a_client_hear_that_it_is_gone(server: RelayServer) -> None:
    async with peer(url(server)) as one, peer(url(server)) as stays_apart:
        async with peer(url(server)) as other, peer(url(server)) as asked:
            await exchange(one, other)
            # One way is enough.
            await one.send_to(asked, b"?")
            assert await asked.receive() == delivered(one.id, b"?")
        assert {await one.receive(), await one.receive()} == {
            protocol.gone(other.id),
            protocol.gone(asked.id),
        }
        await exchange(one, stays_apart)


async def test_the_newest_connection_of_an_id_gets_what_comes(server: RelayServer) -> None:
    secret = SecretKey.generate()
    async with peer(url(server)) as other, peer(url(server), secret=secret) as older:
        await exchange(older, other)
        async with peer(url(server), secret=secret) as newer:
            assert await older.receive() == protocol.status(protocol.RelayStatus.SAME_ID)
            await exchange(newer, other)
        # Two live endpoints with one id: the older one is not thrown out, and takes over again.
        assert await older.receive() == protocol.status(protocol.RelayStatus.HEALTHY)
        await exchange(older, other)
        assert server.counters.replaced == 1
    await until(lambda: not server.clients)


async def test_the_older_connection_may_go_first(server: RelayServer) -> None:
    secret = SecretKey.generate()
    async with peer(url(server)) as other, peer(url(server), secret=secret) as newer_or_older:
        async with peer(url(server), secret=secret, version=protocol.VERSIONS[1]) as newest:
            assert await newer_or_older.receive() == protocol.status(protocol.RelayStatus.SAME_ID)
            await newer_or_older.socket.close()
            await until(lambda: server.connections == 2)
            await exchange(newest, other)
        assert await other.receive() == protocol.gone(newest.id)


async def test_connections_of_one_id_are_few(server: RelayServer) -> None:
    secret = SecretKey.generate()
    opened = [peer(url(server), secret=secret) for _ in range(RELAY_SAME_ID + 3)]
    peers = [await one.__aenter__() for one in opened]
    try:
        await until(lambda: server.connections == RELAY_SAME_ID)
        async with peer(url(server)) as other:
            await exchange(peers[-1], other)
    finally:
        for one in opened:
            await one.__aexit__(None, None, None)


# -- who may come in ----------------------------------------------------------------------------


async def test_token() -> None:
    async with relay(RelayConfig(token=TOKEN)) as server:
        for wrong in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with stranger(url(server), token=wrong):
                    pass
            assert refused.value.status == 401
        async with peer(url(server), token=TOKEN) as one, peer(url(server), token=TOKEN) as other:
            await exchange(one, other)
        assert server.counters.refused == {"wrong token": 5}


async def test_allow_list() -> None:
    friend = SecretKey.generate()
    async with relay(RelayConfig(allowed=frozenset({bytes(friend.public().to_bytes())}))) as server:
        async with stranger(url(server)) as other:
            await other.send(other.sign(await other.receive()))
            assert await other.receive() == protocol.denied("not on the list")
            await other.closed()
        async with peer(url(server), secret=friend) as one:
            assert server.clients == {one.id}


async def test_a_full_relay_says_so() -> None:
    async with (
        relay(RelayConfig(limits=RelayLimits(clients=2))) as server,
        peer(url(server)) as one,
        peer(url(server)) as other,
    ):
        async with stranger(url(server)) as third:
            await third.send(third.sign(await third.receive()))
            assert await third.receive() == protocol.denied("the relay is full")
            await third.closed()
        await exchange(one, other)


async def test_connections_from_one_address_are_limited() -> None:
    async with relay(RelayConfig(limits=RelayLimits(per_address=3))) as server:
        async with peer(url(server)) as one, peer(url(server)) as other, peer(url(server)):
            assert await said_to(server, b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n") == b""
            await exchange(one, other)
        assert server.counters.refused == {"too many connections from one address": 1}
        await until(lambda: not server.clients)
        await assert_unharmed(server)


# -- those who do not behave --------------------------------------------------------------------


async def test_a_wrong_signature(server: RelayServer) -> None:
    async with stranger(url(server)) as liar, peer(url(server)) as honest:
        proof = bytearray(liar.sign(await liar.receive()))
        proof[1:33] = honest.id
        await liar.send(bytes(proof))
        assert await liar.receive() == protocol.denied("wrong signature")
        await liar.closed()
        await assert_unharmed(server)
    assert server.counters.refused == {"wrong signature": 1}


async def test_a_replayed_handshake(server: RelayServer) -> None:
    async with stranger(url(server)) as victim:
        proof = victim.sign(await victim.receive())
        await victim.send(proof)
        assert await victim.receive() == protocol.confirmed()
        async with stranger(url(server), secret=victim.secret) as thief:
            await thief.receive()
            await thief.send(proof)
            assert await thief.receive() == protocol.denied("wrong signature")
            await thief.closed()
        assert server.clients == {victim.id}
        assert server.counters.replaced == 0


async def test_an_id_that_is_no_key(server: RelayServer) -> None:
    async with stranger(url(server)) as liar:
        await liar.receive()
        await liar.send(protocol.authentication(b"\xff" * 32, b"\xff" * 64))
        assert await liar.receive() == protocol.denied("wrong signature")
    await assert_unharmed(server)


GARBAGE = [
    b"",
    b"\x00",
    b"\xff" * 100,
    send_frame(bytes(32), b"before the handshake"),
    b"\x01" + b"a" * (RELAY_FRAME_LIMIT_BYTES - 1),
    b"\x01" + b"a" * RELAY_FRAME_LIMIT_BYTES,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: f"{len(garbage)}-bytes")
async def test_garbage_instead_of_a_handshake(server: RelayServer, garbage: bytes) -> None:
    async with peer(url(server)) as one, peer(url(server)) as other:
        async with stranger(url(server)) as liar:
            await liar.receive()
            await liar.send(garbage)
            await liar.closed()
        assert server.clients == {one.id, other.id}
        await exchange(one, other)


async def _too_long(liar: RelayPeer, to: RelayPeer) -> None:
    await liar.send(send_frame(to.id, b"d" * (RELAY_PACKET_LIMIT_BYTES - 32)))


async def _far_too_long(liar: RelayPeer, to: RelayPeer) -> None:
    await liar.send(send_frame(to.id, b"d" * RELAY_FRAME_LIMIT_BYTES))


async def _text(liar: RelayPeer, to: RelayPeer) -> None:
    await liar.socket.send_str("hello")


async def _delivery(liar: RelayPeer, to: RelayPeer) -> None:
    await liar.send(delivered(to.id, b"forged"))


async def _handshake_again(liar: RelayPeer, to: RelayPeer) -> None:
    await liar.send(liar.sign(protocol.challenge(b"c" * 16)))


@pytest.mark.parametrize(
    "misbehave", [_too_long, _far_too_long, _text, _delivery, _handshake_again], ids=lambda f: f.__name__[1:]
)
async def test_bad_messages_end_the_connection(
    server: RelayServer, misbehave: Callable[[RelayPeer, RelayPeer], Awaitable[None]]
) -> None:
    async with peer(url(server)) as one, peer(url(server)) as other:
        async with peer(url(server)) as liar:
            await misbehave(liar, one)
            await liar.closed()
        await until(lambda: server.clients == {one.id, other.id})
        await exchange(one, other)
    assert server.counters.frames == 2


async def test_random_messages_harm_nobody(server: RelayServer) -> None:
    chance = random.Random(7)
    async with peer(url(server)) as one, peer(url(server)) as other:
        for _ in range(60):
            async with peer(url(server)) as liar:
                frame = bytes([chance.randrange(16)]) + chance.randbytes(chance.randrange(120))
                await liar.send(frame)
        await exchange(one, other)
    assert server.counters.admitted == 62


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /relay HTTP/1.1\r\nHost: x\r\n",
        b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /relay HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: iroh-relay-v2\r\n\r\n",
        b"GET /relay HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: iroh-relay-v2\r\n\r\n\x82",
    ],
    ids=["nothing", "half-a-request", "idle", "no-answer", "half-a-frame"],
)
async def test_who_says_nothing_useful_is_cut_off(said: bytes) -> None:
    async with relay() as server, peer(url(server)) as one, peer(url(server)) as other:
        # Short only now: those two may take their time to come in, on a machine that is busy.
        assert server._door is not None
        server._door.limits = RelayLimits(handshake_s=0.3)
        await said_to(server, said)
        # Those who were let in stay, although they have said nothing since.
        await exchange(one, other)


async def test_not_a_relay_client(server: RelayServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(url(server) + "/relay") as answer:
            assert answer.status == 400
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url(server) + "/relay", protocols=["chat"])
        assert refused.value.status == 400
    assert server.counters.refused == {"no relay client": 2}


async def test_one_that_does_not_read_costs_bounded_memory_and_harms_nobody() -> None:
    limits = RelayLimits(client_bytes_s=0, queue_bytes=128 << 10)
    async with (
        relay(RelayConfig(limits=limits)) as server,
        peer(url(server)) as fast,
        peer(url(server)) as other,
        peer(url(server)) as deaf,
    ):
        datagram = b"d" * 60_000
        # Kernel buffers take some megabytes; from then on everything is dropped.
        while server.counters.dropped[NO_ROOM] < 50:
            await fast.send_to(deaf, datagram)
            await fast.send_to(other, datagram)
            assert await other.receive() == delivered(fast.id, datagram)
            assert server.waiting_bytes(deaf.id) <= limits.queue_bytes + len(datagram) + 64
        # It reads at last: what waited comes, and then what is sent now.
        received = server.counters.frames // 2 - server.counters.dropped[NO_ROOM]
        for _ in range(received):
            assert await deaf.receive() == delivered(fast.id, datagram)
        await exchange(fast, deaf, b"heard again")


async def test_one_that_never_reads_is_sent_away() -> None:
    for dead_s in DEAD_S:
        limits = RelayLimits(client_bytes_s=0, queue_bytes=64 << 10, ping_s=0.15, dead_s=dead_s)
        async with (
            relay(RelayConfig(limits=limits)) as server,
            peer(url(server)) as fast,
            peer(url(server)) as deaf,
        ):
            while {fast.id, deaf.id} <= server.clients:
                # Both go on talking, so that they are not taken for dead, until one is cut off.
                with suppress(aiohttp.ClientConnectionError, ConnectionError):
                    await fast.send_to(deaf, b"d" * 60_000)
                    await deaf.send(protocol.pong(bytes(8)))
                await asyncio.sleep(0)
            removed = dict(server.counters.removed)
        if "silent" not in removed:
            break
    assert removed == {"does not read": 1}


async def test_pings_of_one_that_does_not_read_are_bounded() -> None:
    limits = RelayLimits(client_bytes_s=0, queue_bytes=1 << 10)
    async with relay(RelayConfig(limits=limits)) as server:
        async with peer(url(server)) as fast, peer(url(server)) as deaf:
            while not server.counters.dropped[NO_ROOM]:
                await fast.send_to(deaf, b"d" * 60_000)
            most = limits.queue_bytes + 2 * RELAY_PACKET_LIMIT_BYTES + 64
            # Each ping makes the relay answer: to somebody who does not read, for as long as there is room.
            while deaf.id in server.clients:
                assert server.waiting_bytes(deaf.id) <= most
                with suppress(aiohttp.ClientConnectionError, ConnectionError):
                    for _ in range(100):
                        await deaf.send(protocol.ping(bytes(8)))
        await assert_unharmed(server)


@pytest.mark.parametrize("length", [1, 10_000])
async def test_a_flood_is_slowed_down_to_its_rate(length: int) -> None:
    # A byte costs as much as a kilobyte: it is as much work.
    rate = 200 * max(length, RELAY_MESSAGE_COST_BYTES)
    async with (
        relay(RelayConfig(limits=RelayLimits(client_bytes_s=rate))) as server,
        peer(url(server)) as flooding,
        peer(url(server)) as sink,
        peer(url(server)) as one,
        peer(url(server)) as other,
    ):
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def flood() -> None:
            while True:
                await flooding.send_to(sink, b"f" * length)

        async def drain() -> None:
            while True:
                await sink.receive()

        tasks = [asyncio.create_task(flood()), asyncio.create_task(drain())]
        await until(lambda: server.counters.throttled >= 5)
        passed, elapsed = server.counters.frames, loop.time() - started
        # Others are not slowed down by it.
        for _ in range(20):
            await exchange(one, other)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert passed <= 200 * (elapsed + 1) + 1


async def test_datagrams_for_a_client_whose_connection_just_broke(server: RelayServer) -> None:
    async with peer(url(server)) as one, peer(url(server)) as other:
        flooding = True

        async def flood(to: bytes) -> None:
            while flooding:
                await one.send(send_frame(to, b"d" * 1000))
                await asyncio.sleep(0)

        for _ in range(5):
            async with peer(url(server)) as leaving:
                task = asyncio.create_task(flood(leaving.id))
                await leaving.receive()
                client = server._clients[leaving.id]
                client.abort()
                # Between the end of a connection and the moment at which its task hears of it.
                assert client.deliver(b"late") is False
                client.tell(b"late")
                await until(lambda: server.connections == 2)
                flooding = False
                await task
                flooding = True
            assert await one.receive() == protocol.gone(leaving.id)
        await exchange(one, other)
        assert server.counters.admitted == 7


async def test_a_silent_client_is_asked_and_then_removed() -> None:
    async def answer(lively: RelayPeer) -> None:
        while frame := await lively.receive():
            if frame[0] == protocol.FrameKind.PING:
                await lively.send(protocol.pong(frame[1:]))

    for dead_s in DEAD_S:
        limits = RelayLimits(ping_s=0.15, dead_s=dead_s)
        async with relay(RelayConfig(limits=limits)) as server, peer(url(server)) as lively:
            answering = asyncio.create_task(answer(lively))
            async with peer(url(server)) as silent:
                asked = await silent.receive()
                await until(lambda: silent.id not in server.clients, within_s=ANSWER_S + dead_s)
            left, removed = server.clients, dict(server.counters.removed)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if asked and left == {lively.id}:
            break
    assert asked[:1] == b"\x09"
    assert removed == {"silent": 1}
    assert left == {lively.id}


# -- beside relaying ----------------------------------------------------------------------------


async def test_health_and_probes(server: RelayServer) -> None:
    async with aiohttp.ClientSession(url(server)) as session:

        async def get(path: str, **headers: str) -> tuple[int, str, str | None]:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.get(path, headers=sent) as answer:
                return answer.status, await answer.text(), answer.headers.get("X-Iroh-Response")

        assert await get("/ping") == (200, "pong\n", None)
        assert await get("/health") == (200, '{"status": "ok"}', None)
        assert await get("/generate_204") == (204, "", None)
        assert await get("/generate_204", X_Iroh_Challenge="abc.1") == (204, "", "response abc.1")
        assert await get("/generate_204", X_Iroh_Challenge="a b<") == (204, "", None)
        assert (await get("/metrics"))[0] == 404
        async with session.post("/relay") as answer:
            assert answer.status == 405


async def test_metrics() -> None:
    async with (
        relay(RelayConfig(token=TOKEN, metrics=True)) as server,
        peer(url(server), token=TOKEN) as one,
        peer(url(server), token=TOKEN) as other,
        aiohttp.ClientSession(url(server)) as session,
    ):
        await exchange(one, other)
        await one.send(send_frame(bytes(32), b"lost"))
        await until(lambda: server.counters.dropped)
        async with session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert "mesh_relay_clients 2.0" in lines
        assert "mesh_relay_delivered_total 2.0" in lines
        assert f'mesh_relay_dropped_total{{reason="{UNKNOWN}"}} 1.0' in lines
        assert TOKEN not in "\n".join(lines)
        # A proxy on this machine speaks for others, who need the token.
        forwarded = {"X-Forwarded-For": "192.0.2.1"}
        async with session.get("/metrics", headers=forwarded) as answer:
            assert answer.status == 401
        async with session.get(
            "/metrics", headers={**forwarded, "Authorization": f"Bearer {TOKEN}"}
        ) as answer:
            assert answer.status == 200


async def test_stopping_ends_every_connection() -> None:
    async with relay() as server, peer(url(server)) as one, peer(url(server)) as other:
        await exchange(one, other)
        await server.stop()
        await one.closed()
        await other.closed()
        with pytest.raises(aiohttp.ClientConnectionError):
            async with stranger(url(server)):
                pass


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


async def test_tls(certificate: tuple[Path, Path]) -> None:
    context: Any = ssl.create_default_context(cafile=str(certificate[0]))
    async with relay(tls=ports.tls(*certificate)) as server:
        secure = url(server, "https")
        async with peer(secure, tls=context) as one, peer(secure, tls=context) as other:
            await exchange(one, other, b"d" * 60_000)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            async with stranger(secure):
                pass


@asynccontextmanager
async def proxy(server: RelayServer, tls: ssl.SSLContext) -> AsyncIterator[str]:
    """Ends TLS before the relay, to which all its clients then have one address."""
    open_ends: list[asyncio.StreamWriter] = []

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while chunk := await source.read(1 << 16):
                sink.write(chunk)
                await sink.drain()
        sink.close()

    async def forward(near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        far, to_relay = await asyncio.open_connection("127.0.0.1", server.port)
        open_ends.extend((out, to_relay))
        await asyncio.gather(pump(near, to_relay), pump(far, out))

    listening = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for end in open_ends:
            end.transport.abort()


@pytest.mark.parametrize("per_address", [3, 0])
async def test_behind_a_proxy_that_ends_tls(certificate: tuple[Path, Path], per_address: int) -> None:
    context: Any = ssl.create_default_context(cafile=str(certificate[0]))
    config = RelayConfig(limits=RelayLimits(per_address=per_address))
    async with (
        relay(config) as server,
        proxy(server, ports.tls(*certificate)) as secure,
        AsyncExitStack() as peers,
    ):
        one, other, third = [await peers.enter_async_context(peer(secure, tls=context)) for _ in range(3)]
        await exchange(one, other, b"d" * 60_000)
        if per_address:
            with pytest.raises(aiohttp.ClientConnectionError):
                await peers.enter_async_context(stranger(secure, tls=context))
            # The client's library tries again by itself.
            assert server.counters.refused.keys() == {"too many connections from one address"}
        else:
            more = [await peers.enter_async_context(peer(secure, tls=context)) for _ in range(3)]
            for late in more:
                await exchange(third, late)
            assert server.counters.refused == {}
