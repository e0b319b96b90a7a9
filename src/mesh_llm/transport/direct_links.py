"""Data links that need no QUIC: a door that lets in whoever holds a one-time ticket.

    async with open_door(run_folder / "links.sock") as door:
        port = door.listen("192.168.1.7")       # where plain TCP may be used
        arriving = door.expect(ticket)          # told to the other side over the control channel
        link = await arriving

    link = await knock_local(path, ticket)      # the other side, on the same machine
    link = await knock_tcp(host, port, ticket)  # or in the same private network

What comes out on both sides is a plain blocking socket, fit to be handed to a
native child. Nothing of the ticket travels but its name and proofs of it, which
hold for this one connection:

    knock   MAGIC (8), name of the ticket (16), nonce (32)
    door    nonce (32), proof of the door (32)
    knock   proof of the knock (32)
    door    TAKEN (1)

The door proves itself first, with its own label and both nonces: what it says is
of no use to somebody who only listens, repeats or reflects. After TAKEN the bytes
are the children's own. A wrong knock is dropped without a word.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mesh_llm.defaults import LINK_TICKET_BYTES
from mesh_llm.errors import LinkFailed

LINK_KNOCK_S = 5.0
"""For a knock to prove itself: two round trips, on a slow line and a busy machine."""
LINK_EXPECT_S = 30.0
"""For a link that was agreed on to arrive: the other side has to be told, and may have to try again."""
LINK_EXPECTED_LIMIT = 256
"""Links waited for at once: a plan over a hundred nodes has two for each."""
LINK_ADDRESSES_LIMIT = 8
"""Of one machine, at which plain TCP links arrive: its interfaces, and those that changed meanwhile."""
LINK_KNOCKS_LIMIT = 32
"""Unproven connections at a door, by kind; one more, and the oldest goes. Honest ones take milliseconds."""


log = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC = b"meshlnk1"
_NAME_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_TAKEN = b"\x01"
_ACCEPT_PAUSE_S = 0.1
"""After the system refused a connection, for want of descriptors: the next try costs nothing."""


def new_ticket() -> bytes:
    return secrets.token_bytes(LINK_TICKET_BYTES)


class LinkListener:
    """Where links arrive. Made by `open_door`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ports: dict[str, int] = {}
        """Of TCP, by the address of this machine."""
        self._listeners: list[socket.socket] = []
        self._expected: dict[bytes, _Expected] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def expect(self, ticket: bytes) -> asyncio.Future[socket.socket]:
        """The link that will come with this ticket. From now on it is let in, once, for a bounded time."""
        if len(ticket) != LINK_TICKET_BYTES:
            raise ValueError(f"a ticket has {LINK_TICKET_BYTES} bytes, not {len(ticket)}")
        if len(self._expected) >= LINK_EXPECTED_LIMIT:
            raise LinkFailed(f"{LINK_EXPECTED_LIMIT} links are being waited for already")
        name = _name(ticket)
        if name in self._expected:
            raise LinkFailed("a link with this ticket is being waited for already")
        loop = asyncio.get_running_loop()
        expected = _Expected(ticket, loop.create_future())
        timer = loop.call_later(LINK_EXPECT_S, expected.give_up)
        self._expected[name] = expected

        def forget(_: asyncio.Future[socket.socket]) -> None:
            timer.cancel()
            self._expected.pop(name, None)

        expected.arrival.add_done_callback(forget)
        return expected.arrival

    def listen(self, ip: str) -> int:
        """Take links at this address of the machine, too; the TCP port."""
        if ip not in self._ports:
            if len(self._ports) >= LINK_ADDRESSES_LIMIT:
                raise LinkFailed(f"links arrive at {LINK_ADDRESSES_LIMIT} addresses already")
            listener = _listen_tcp(ip)
            self._ports[ip] = listener.getsockname()[1]
            self._admit(listener)
        return self._ports[ip]

    def _admit(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._own(self._accept(listener), "link door")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # By age: a dictionary keeps the order in which knocks came.
        knocks: dict[asyncio.Task[bool], None] = {}
        while True:
            try:
                knock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a link could not be accepted: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(knocks) >= LINK_KNOCKS_LIMIT:
                oldest = next(iter(knocks))
                del knocks[oldest]
                oldest.cancel()
            task = self._own(self._answer(knock), "knock")
            knocks[task] = None
            task.add_done_callback(lambda done: knocks.pop(done, None))
            task.add_done_callback(partial(_close_unless_let_in, knock))

    def _own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, knock: socket.socket) -> bool:
        try:
            async with asyncio.timeout(LINK_KNOCK_S):
                return await self._let_in(knock)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("a knock was dropped: %r", error)
            return False

    async def _let_in(self, knock: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        knock.setblocking(False)
        _tune(knock)
        head = await _read(knock, len(_MAGIC) + _NAME_BYTES + _NONCE_BYTES)
        name = head[len(_MAGIC) : -_NONCE_BYTES]
        expected = self._expected.get(name)
        if not head.startswith(_MAGIC) or expected is None:
            return False
        nonces = head[-_NONCE_BYTES:], secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(knock, nonces[1] + _proof(expected.ticket, b"door", nonces))
        shown = await _read(knock, _PROOF_BYTES)
        if not hmac.compare_digest(shown, _proof(expected.ticket, b"knock", nonces)):
            return False
        # Somebody with the same ticket may have been faster, or nobody waits any more.
        if expected.arrival.done():
            return False
        # One byte into an empty buffer. Sent before anybody else may write to the link.
        if knock.send(_TAKEN) != len(_TAKEN):
            return False
        knock.setblocking(True)
        expected.arrival.set_result(knock)
        return True

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for expected in list(self._expected.values()):
            expected.arrival.cancel()
        for listener in self._listeners:
            listener.close()


def _close_unless_let_in(knock: socket.socket, answering: asyncio.Task[bool]) -> None:
    # Here and not in the task, which may be cancelled before its first step.
    if answering.cancelled() or not answering.result():
        knock.close()


class _Expected:
    def __init__(self, ticket: bytes, arrival: asyncio.Future[socket.socket]) -> None:
        self.ticket = ticket
        self.arrival = arrival

    def give_up(self) -> None:
        if not self.arrival.done():
            self.arrival.set_exception(
                LinkFailed(
                    f"a data link did not arrive within {LINK_EXPECT_S:.0f} s",
                    hint="check in mesh-llm status whether the other node can reach this one",
                )
            )


@asynccontextmanager
async def open_door(path: Path) -> AsyncIterator[LinkListener]:
    """Listen at a unix socket, private to its owner; elsewhere, too, once told to `listen`."""
    door = LinkListener(path)
    try:
        door._admit(_listen_local(path))
        yield door
    finally:
        await door._close()
        path.unlink(missing_ok=True)


def _listen_local(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # Nobody can connect before it listens.
        path.chmod(0o600)
        listener.listen(LINK_KNOCKS_LIMIT)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise LinkFailed(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def _listen_tcp(ip: str) -> socket.socket:
    listener = socket.socket(_family(ip), socket.SOCK_STREAM)
    try:
        listener.bind((ip, 0))
        listener.listen(LINK_KNOCKS_LIMIT)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise LinkFailed(
            f"cannot listen at {ip}: {error.strerror or error}",
            hint="--bind-ip names an address of this machine",
        ) from error
    return listener


def _family(ip: str) -> socket.AddressFamily:
    try:
        version = ipaddress.ip_address(ip).version
    except ValueError:
        raise LinkFailed(f"{ip!r} is not an IP address") from None
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def facing(ip: str) -> str:
    """The address of this machine from which it would speak to `ip`. Nothing is sent."""
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))
        except OSError as error:
            raise LinkFailed(f"there is no route to {ip}: {_cause(error)}") from None
        return str(probe.getsockname()[0])


# -- the other side of the door ----------------------------------------------------------------------


async def knock_local(path: Path, ticket: bytes) -> socket.socket:
    """A link to the node on this machine that expects this ticket."""
    return await _knock(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), ticket)


async def knock_tcp(host: str, port: int, ticket: bytes) -> socket.socket:
    """A link as it is, without encryption, to the node that expects this ticket."""
    family = _family(host)
    return await _knock(lambda: socket.socket(family, socket.SOCK_STREAM), (host, port), ticket)


async def _knock(make: Callable[[], socket.socket], address: Any, ticket: bytes) -> socket.socket:
    link = make()
    entered = False
    try:
        async with asyncio.timeout(LINK_KNOCK_S):
            await _enter(link, address, ticket)
        entered = True
        return link
    except TimeoutError:
        raise LinkFailed(f"{_shown(address)} did not answer within {LINK_KNOCK_S:.0f} s") from None
    except EOFError:
        raise LinkFailed(f"{_shown(address)} refused a data link") from None
    except OSError as error:
        raise LinkFailed(f"cannot reach {_shown(address)}: {_cause(error)}") from error
    finally:
        if not entered:
            link.close()


async def _enter(link: socket.socket, address: Any, ticket: bytes) -> None:
    loop = asyncio.get_running_loop()
    link.setblocking(False)
    await loop.sock_connect(link, address)
    _tune(link)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(link, _MAGIC + _name(ticket) + nonce)
    answer = await _read(link, _NONCE_BYTES + _PROOF_BYTES)
    nonces = nonce, answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(ticket, b"door", nonces)):
        raise LinkFailed(f"{_shown(address)} is not the expected node")
    await loop.sock_sendall(link, _proof(ticket, b"knock", nonces))
    if await _read(link, len(_TAKEN)) != _TAKEN:
        raise LinkFailed(f"{_shown(address)} refused a data link")
    link.setblocking(True)


def _cause(error: OSError) -> str:
    # asyncio writes a text of its own over the system's.
    return os.strerror(error.errno) if error.errno else str(error)


def _shown(address: Any) -> str:
    return address if isinstance(address, str) else f"{address[0]} port {address[1]}"


def _tune(link: socket.socket) -> None:
    if link.family is not socket.AF_UNIX:
        # Activations are smaller than a segment, and waited for.
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _read(link: socket.socket, size: int) -> bytes:
    """Exactly so many: the bytes behind them belong to somebody else."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        data = await loop.sock_recv(link, size - len(received))
        if not data:
            raise EOFError
        received += data
    return received


def _name(ticket: bytes) -> bytes:
    return hmac.digest(ticket, b"mesh-llm link name", "sha256")[:_NAME_BYTES]


def _proof(ticket: bytes, label: bytes, nonces: tuple[bytes, bytes]) -> bytes:
    return hmac.digest(ticket, b"mesh-llm link " + label + b"".join(nonces), "sha256")
