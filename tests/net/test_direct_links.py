"""Doors and knocks: a unix socket, and a TCP port on loopback where it was asked for."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from mesh_llm.errors import LinkFailed
from mesh_llm.transport import direct_links
from mesh_llm.transport.direct_links import (
    LINK_ADDRESSES_LIMIT,
    LINK_EXPECTED_LIMIT,
    LINK_KNOCKS_LIMIT,
    LinkListener,
    facing,
    knock_local,
    knock_tcp,
    new_ticket,
    open_door,
)

WAIT_S = 30.0
LOOPBACK = "127.0.0.1"

T = TypeVar("T")
Knock = Callable[[LinkListener, bytes], Awaitable[socket.socket]]


async def soon(work: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await work


def port_of(door: LinkListener) -> int:
    return door.listen(LOOPBACK)


async def locally(door: LinkListener, ticket: bytes) -> socket.socket:
    return await knock_local(door.path, ticket)


async def over_tcp(door: LinkListener, ticket: bytes) -> socket.socket:
    return await knock_tcp(LOOPBACK, port_of(door), ticket)


@pytest.fixture(params=[locally, over_tcp], ids=["local", "tcp"])
def knock(request: pytest.FixtureRequest) -> Knock:
    chosen: Knock = request.param
    return chosen


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[LinkListener]:
    async with open_door(tmp_path / "l.sock") as door:
        yield door


async def raw(door: LinkListener) -> socket.socket:
    """A stranger's connection."""
    stranger = socket.socket()
    stranger.setblocking(False)
    await soon(asyncio.get_running_loop().sock_connect(stranger, (LOOPBACK, port_of(door))))
    return stranger


async def hears(stranger: socket.socket) -> bytes:
    """All that is said until the other side hangs up."""
    received = b""
    try:
        while data := await soon(asyncio.get_running_loop().sock_recv(stranger, 1 << 16)):
            received += data
    except ConnectionResetError:
        pass
    return received


def assert_joined(one: socket.socket, other: socket.socket) -> None:
    for here, there in ((one, other), (other, one)):
        assert here.getblocking()
        here.sendall(b"activations")
        assert there.recv(64) == b"activations"


async def test_a_ticket_lets_a_link_in(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    with await soon(knock(door, ticket)) as near, await soon(arriving) as far:
        assert_joined(near, far)
        if near.family == socket.AF_INET:
            for end in (near, far):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_bytes_sent_right_behind_the_handshake_belong_to_the_link(
    door: LinkListener, knock: Knock
) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    with await soon(knock(door, ticket)) as near:
        near.sendall(b"first")
        with await soon(arriving) as far:
            far.sendall(b"second")
            assert far.recv(64) == b"first"
            assert near.recv(64) == b"second"


async def test_the_socket_is_private_and_goes_with_the_door(tmp_path: Path) -> None:
    path = tmp_path / "l.sock"
    path.write_text("left by a node that was killed")
    async with open_door(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()


async def test_a_wrong_ticket_is_dropped_and_spoils_nothing(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    with pytest.raises(LinkFailed, match="refused a data link"):
        await soon(knock(door, new_ticket()))
    assert not arriving.done()
    with await soon(knock(door, ticket)) as near, await soon(arriving) as far:
        assert_joined(near, far)


async def test_a_ticket_is_good_for_one_link(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    (await soon(knock(door, ticket))).close()
    (await soon(arriving)).close()
    with pytest.raises(LinkFailed, match="refused a data link"):
        await soon(knock(door, ticket))


async def test_a_ticket_is_waited_for_once(door: LinkListener, knock: Knock) -> None:
    """Another node chooses it: that one is refused, and the first link comes all the same."""
    ticket = new_ticket()
    arriving = door.expect(ticket)
    with pytest.raises(LinkFailed, match="is being waited for already"):
        door.expect(ticket)
    with await soon(knock(door, ticket)) as near, await soon(arriving) as far:
        assert_joined(near, far)


async def test_of_many_with_the_same_ticket_one_gets_in(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    results = await soon(asyncio.gather(*(knock(door, ticket) for _ in range(8)), return_exceptions=True))
    (near,) = [result for result in results if isinstance(result, socket.socket)]
    assert all(isinstance(result, LinkFailed) for result in results if result is not near)
    with near, await soon(arriving) as far:
        assert_joined(near, far)


async def test_many_links_at_once_find_their_own(door: LinkListener, knock: Knock) -> None:
    tickets = [new_ticket() for _ in range(24)]
    arriving = [door.expect(ticket) for ticket in tickets]
    knocks = await soon(asyncio.gather(*(knock(door, ticket) for ticket in reversed(tickets))))
    with ExitStack() as stack:
        pairs = [
            (stack.enter_context(near), stack.enter_context(await soon(far)))
            for near, far in zip(reversed(knocks), arriving, strict=True)
        ]
        for near, far in pairs:
            assert_joined(near, far)


async def test_the_ticket_is_not_on_the_wire_and_a_recording_opens_nothing(door: LinkListener) -> None:
    recorded: dict[str, bytearray] = {"knock": bytearray(), "door": bytearray()}
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: str) -> None:
        while data := await reader.read(4096):
            recorded[side] += data
            writer.write(data)
        writer.close()

    async def listen_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(LOOPBACK, port_of(door))
        pumps.append(asyncio.create_task(pump(reader, back, "knock"), name="there"))
        pumps.append(asyncio.create_task(pump(there, writer, "door"), name="back"))

    ticket = new_ticket()
    arriving = door.expect(ticket)
    async with await asyncio.start_server(listen_in, LOOPBACK, 0) as server:
        near = await soon(knock_tcp(LOOPBACK, server.sockets[0].getsockname()[1], ticket))
        with near, await soon(arriving):
            assert (len(recorded["knock"]), len(recorded["door"])) == (88, 65)
            assert ticket not in recorded["knock"] + recorded["door"]
        await soon(asyncio.wait(pumps))
    again = door.expect(ticket)
    with await raw(door) as stranger:
        await asyncio.get_running_loop().sock_sendall(stranger, bytes(recorded["knock"]))
        said = await hears(stranger)
    assert len(said) == 64, "the door proves itself to anybody, and takes nobody"
    assert said != recorded["door"][:64]
    assert not again.done()
    again.cancel()


async def test_the_doors_own_proof_is_no_proof_of_a_knock(door: LinkListener) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    loop = asyncio.get_running_loop()
    with await raw(door) as stranger:
        await loop.sock_sendall(stranger, b"meshlnk1" + direct_links._name(ticket) + b"n" * 32)
        answer = await soon(loop.sock_recv(stranger, 64))
        await loop.sock_sendall(stranger, answer[32:])
        assert await hears(stranger) == b""
    assert not arriving.done()
    arriving.cancel()


async def test_a_stranger_at_the_address_of_the_door_is_found_out() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(56)
        writer.write(b"x" * 64)
        received.append(await reader.read(64))
        writer.close()

    received: list[bytes] = []
    async with await asyncio.start_server(pretend, LOOPBACK, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LinkFailed, match=f"127.0.0.1 port {port} is not the expected node"):
            await soon(knock_tcp(LOOPBACK, port, new_ticket()))
        async with asyncio.timeout(WAIT_S):
            while not received:
                await asyncio.sleep(0.01)
    assert received == [b""], "a stranger is shown no proof"


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, b"meshlnk1" + b"?" * 48])
async def test_nonsense_is_dropped_without_a_word(door: LinkListener, nonsense: bytes) -> None:
    with await raw(door) as stranger:
        await asyncio.get_running_loop().sock_sendall(stranger, nonsense)
        assert await hears(stranger) == b""


async def test_silence_is_dropped(door: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_links, "LINK_KNOCK_S", 0.05)
    with await raw(door) as stranger:
        await asyncio.get_running_loop().sock_sendall(stranger, b"meshlnk1")
        assert await hears(stranger) == b""


async def test_strangers_who_only_wait_keep_nobody_out(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    arriving = door.expect(ticket)
    with ExitStack() as stack:
        strangers = [stack.enter_context(await raw(door)) for _ in range(2 * LINK_KNOCKS_LIMIT)]
        with await soon(knock(door, ticket)) as near, await soon(arriving) as far:
            assert_joined(near, far)
        # Those beyond the limit are gone, the oldest first; without that they would wait for seconds.
        assert await hears(strangers[0]) == b""


async def test_a_link_that_does_not_arrive(door: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_links, "LINK_EXPECT_S", 0.05)
    ticket = new_ticket()
    with pytest.raises(LinkFailed, match="a data link did not arrive within"):
        await soon(door.expect(ticket))
    with pytest.raises(LinkFailed, match="refused a data link"):
        await soon(over_tcp(door, ticket))


async def test_nobody_is_let_in_for_somebody_who_no_longer_waits(door: LinkListener, knock: Knock) -> None:
    ticket = new_ticket()
    door.expect(ticket).cancel()
    await asyncio.sleep(0)
    with pytest.raises(LinkFailed, match="refused a data link"):
        await soon(knock(door, ticket))


async def test_a_door_that_closes_ends_what_waits_at_it(tmp_path: Path) -> None:
    async with open_door(tmp_path / "l.sock") as door:
        arriving = door.expect(new_ticket())
        stranger = await raw(door)
    with stranger:
        assert await hears(stranger) == b""
    with pytest.raises(asyncio.CancelledError):
        await arriving


async def test_waiting_is_bounded_and_tickets_have_a_form(door: LinkListener) -> None:
    with pytest.raises(ValueError, match="a ticket has 32 bytes, not 5"):
        door.expect(b"short")
    for _ in range(LINK_EXPECTED_LIMIT):
        door.expect(new_ticket())
    with pytest.raises(LinkFailed, match="256 links are being waited for already"):
        door.expect(new_ticket())


async def test_where_nobody_listens(tmp_path: Path) -> None:
    # Bound, so that nobody else gets the port meanwhile, and not listening.
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        port = taken.getsockname()[1]
        with pytest.raises(LinkFailed, match=f"cannot reach 127.0.0.1 port {port}: Connection refused"):
            await soon(knock_tcp(LOOPBACK, port, new_ticket()))
    with pytest.raises(LinkFailed, match=r"cannot reach .*l\.sock: No such file or directory"):
        await soon(knock_local(tmp_path / "l.sock", new_ticket()))
    with pytest.raises(LinkFailed, match="'nowhere' is not an IP address"):
        await soon(knock_tcp("nowhere", 1, new_ticket()))


async def test_an_address_of_another_machine(tmp_path: Path) -> None:
    async with open_door(tmp_path / "l.sock") as door:
        with pytest.raises(LinkFailed, match=r"cannot listen at 192\.0\.2\.1"):
            door.listen("192.0.2.1")
    assert not (tmp_path / "l.sock").exists()


async def test_more_addresses_than_a_machine_has(door: LinkListener) -> None:
    ports = [door.listen(f"127.0.0.{number + 1}") for number in range(LINK_ADDRESSES_LIMIT)]
    assert ports[0] == door.listen(LOOPBACK)
    with pytest.raises(LinkFailed, match="links arrive at 8 addresses already"):
        door.listen("127.0.1.1")


def test_the_address_that_faces_another() -> None:
    assert facing(LOOPBACK) == LOOPBACK
    with pytest.raises(LinkFailed, match="'nowhere' is not an IP address"):
        facing("nowhere")
