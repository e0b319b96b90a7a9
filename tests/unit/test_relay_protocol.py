"""The relay's messages and allowances, without a network."""

from __future__ import annotations

import random

import pytest
from aiohttp import web
from iroh.iroh_ffi import SecretKey, Signature

from mesh_llm.cli.relay import parse_listen
from mesh_llm.defaults import RELAY_CLIENTS_SPARE, RELAY_PACKET_LIMIT_BYTES
from mesh_llm.errors import UsageError
from mesh_llm.loopback import is_loopback
from mesh_llm.relay import protocol as protocol
from mesh_llm.relay.connections import RELAY_ARRIVALS_S, RelayConnections, source_of
from mesh_llm.relay.limits import Allowance, RelayLimits
from mesh_llm.relay.metrics import RelayCounters
from mesh_llm.relay.protocol import BadFrame, Pong, RelayPing, RelaySend
from mesh_llm.relay.server import RelayConfig

ID, OTHER = bytes(range(32)), bytes(range(32, 64))
LONGEST = RELAY_PACKET_LIMIT_BYTES - 32


def test_a_datagram_is_delivered_as_it_came() -> None:
    send = protocol.parse(b"\x04" + OTHER + b"\x02" + b"datagram")

    assert send == RelaySend(OTHER, False, b"\x02datagram")
    assert isinstance(send, RelaySend)
    assert protocol.deliver(ID, send) == b"\x06" + ID + b"\x02datagram"


def test_a_batch_is_delivered_as_it_came() -> None:
    send = protocol.parse(b"\x05" + OTHER + b"\x00\x00\x04" + b"fourfoursix")

    assert isinstance(send, RelaySend)
    assert protocol.deliver(ID, send) == b"\x07" + ID + b"\x00\x00\x04fourfoursix"


def test_ping_and_pong() -> None:
    assert protocol.parse(b"\x09" + b"12345678") == RelayPing(b"12345678")
    assert protocol.parse(b"\x0a" + b"12345678") == Pong(b"12345678")
    assert protocol.ping(b"12345678") == b"\x0912345678"
    assert protocol.pong(b"12345678") == b"\x0a12345678"


def test_what_the_relay_says() -> None:
    assert protocol.challenge(b"c" * 16) == b"\x00" + b"c" * 16
    assert protocol.confirmed() == b"\x02"
    assert protocol.denied("no") == b"\x03\x02no"
    assert protocol.gone(ID) == b"\x08" + ID
    assert protocol.status(protocol.RelayStatus.SAME_ID) == b"\x0d\x01"
    assert len(protocol.denied("x" * 1000)) == 2 + protocol.REASON_LIMIT_BYTES


@pytest.mark.parametrize("length", [1, LONGEST - 1])
def test_a_datagram_up_to_the_limit(length: int) -> None:
    send = protocol.parse(b"\x04" + OTHER + b"\0" + b"d" * length)

    assert isinstance(send, RelaySend)
    assert len(protocol.deliver(ID, send)) == 34 + length <= 1 + RELAY_PACKET_LIMIT_BYTES


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x04",
        b"\x04" + OTHER,
        b"\x04" + OTHER + b"\0",
        b"\x04" + OTHER + b"\0" + b"d" * LONGEST,
        b"\x05" + OTHER + b"\0\0\1",
        b"\x05" + OTHER + b"\0\0\0" + b"d",
        b"\x05" + OTHER + b"\0\0\1" + b"d" * LONGEST,
        b"\x09" + b"1234567",
        b"\x0a" + b"123456789",
        *(bytes([kind]) + OTHER * 4 for kind in (0, 1, 2, 3, 6, 7, 8, 11, 12, 13, 14, 0x40, 0xFF)),
    ],
)
def test_what_no_client_sends_is_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        protocol.parse(frame)


def test_an_authentication_is_verified_by_the_message_that_was_signed() -> None:
    secret, random_bytes = SecretKey.generate(), b"r" * 16
    message = protocol.signed_message(random_bytes)
    signature = bytes(secret.sign(message).to_bytes())
    id = bytes(secret.public().to_bytes())

    claim = protocol.parse_authentication(protocol.authentication(id, signature))

    assert (claim.id, claim.signature) == (id, signature)
    secret.public().verify(message, Signature.from_bytes(claim.signature))
    # Written down once, from what an endpoint accepts: a relay that derives it otherwise lets nobody in.
    assert message.hex() == "dcf50262d08e9d11f43f056b400ea467e46ee50e62530e18653647abc54439e6"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x01" + ID + b"\x40" + b"s" * 63,
        b"\x01" + ID + b"\x40" + b"s" * 65,
        b"\x01" + ID + b"\x3f" + b"s" * 64,
        b"\x02" + ID + b"\x40" + b"s" * 64,
    ],
)
def test_what_is_no_authentication_is_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        protocol.parse_authentication(frame)


def test_random_bytes_are_parsed_or_refused_and_nothing_else() -> None:
    chance = random.Random(11)
    parsed = refused = 0
    for _ in range(20_000):
        length = chance.choice((0, 1, 9, 33, 34, 35, 36, 37, 98, chance.randrange(300)))
        frame = bytearray(chance.randbytes(length))
        if frame and chance.random() < 0.8:
            frame[0] = chance.randrange(16)
        for parse in (protocol.parse, protocol.parse_authentication):
            try:
                found = parse(bytes(frame))
            except BadFrame:
                refused += 1
                continue
            parsed += 1
            if isinstance(found, RelaySend):
                # Not a byte is lost or added on the way.
                assert len(protocol.deliver(ID, found)) == len(frame)
                assert protocol.deliver(found.destination, found)[1:] == bytes(frame[1:])
    assert parsed > 1000
    assert refused > 1000


def test_an_allowance_is_a_second_at_once_and_its_rate_over_time() -> None:
    allowance = Allowance(100, now=0.0)

    assert allowance.spend(100, now=0.0) == 0.0
    assert allowance.spend(50, now=0.0) == 0.5
    assert allowance.spend(50, now=0.5) == 0.5
    assert allowance.spend(0, now=1.0) == 0.0
    # An hour of silence does not save up more than a second's worth.
    assert allowance.spend(200, now=3600.0) == 1.0


def test_no_rate_is_no_limit() -> None:
    assert Allowance(0, now=0.0).spend(1 << 40, now=0.0) == 0.0


@pytest.mark.parametrize(
    ("peername", "source"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 0), "fe80::/64"),
        ("/a/path", "unknown"),
        (None, "unknown"),
    ],
)
def test_whom_a_connection_counts_for(peername: object, source: str) -> None:
    assert source_of(peername) == source


async def _nobody(request: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError


async def test_an_address_that_connects_again_and_again_is_slowed_down() -> None:
    door = RelayConnections(_nobody, RelayLimits(per_address=4), RelayCounters())

    def come(source: str, now: float) -> str | None:
        refusal = door.enter(source, now)
        door.leave(source)
        return refusal

    most = 4 * RELAY_ARRIVALS_S
    assert [come("192.0.2.1", 0.0) for _ in range(most)] == [None] * most
    assert come("192.0.2.1", 0.0) == "one address connects too often"
    assert come("192.0.2.2", 0.0) is None
    assert come("192.0.2.1", 1.0) is None


async def test_connections_are_counted_by_address_and_in_all() -> None:
    door = RelayConnections(_nobody, RelayLimits(clients=1, per_address=2), RelayCounters())

    assert [door.enter("192.0.2.1", 0.0) for _ in range(2)] == [None, None]
    assert door.enter("192.0.2.1", 0.0) == "too many connections from one address"
    for number in range(RELAY_CLIENTS_SPARE - 2):
        assert door.enter(f"198.51.100.{number}", 0.0) is None
    assert door.enter("203.0.113.1", 0.0) == "too many connections"
    door.leave("203.0.113.1")
    door.leave("192.0.2.1")
    assert door.enter("203.0.113.1", 0.0) is None


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:3340", ("127.0.0.1", 3340)),
        ("relay.example:0", ("relay.example", 0)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0", ("0.0.0.0", 3340)),
    ],
)
def test_listen(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed


@pytest.mark.parametrize("text", ["", ":1", "::1:80", "a:b", "a:65536", "a:1:2", "[::1", "a:-1"])
def test_listen_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="is not ADDR:PORT"):
        parse_listen(text)


def test_a_relay_for_everybody_is_refused() -> None:
    open_to_all = RelayConfig()
    open_to_all.check("127.0.0.1")
    with pytest.raises(UsageError, match=r"a relay on 0\.0\.0\.0 would serve anybody"):
        open_to_all.check("0.0.0.0")
    RelayConfig(token="t").check("0.0.0.0")
    RelayConfig(allowed=frozenset({ID})).check("::")


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "line\n", "x" * 256])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="a relay's token has 1 to 255 letters"):
        RelayConfig(token=token).check("127.0.0.1")


def test_a_token_is_not_shown() -> None:
    assert "hush" not in repr(RelayConfig(token="hush"))


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("relay.example", False)],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
