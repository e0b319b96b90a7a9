"""Links over QUIC on one machine: two processes with an iroh endpoint each, as two nodes have.

    async with quic_lines([QuicLine(one=one, other=other)], splicing=Splicing(library=path)) as lines:
        ...
        await lines.cpu_s()     # what the two processes have used so far

The two ends of a line are spliced to the two ends of one stream; all lines share
one connection, on loopback.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import iroh.iroh_ffi as iroh_ffi
import uvloop
from iroh.iroh_ffi import (
    BiStream,
    Connection,
    Endpoint,
    EndpointAddr,
    EndpointOptions,
    EndpointTicket,
    RelayConfig,
    RelayMap,
    RelayMode,
    preset_minimal,
)

from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.delay import OPEN, DelayDoor, delay_lines
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.native_splice import load_native
from mesh_llm.transport.splice import Splicer, splice

_ALPN = b"mesh-lab/splice/1"
_SO_ATTACH_FILTER = 26
_ANSWER_S = 30.0
"""For a process to start, connect or report; it needs a second at the most."""


@frozen
class QuicLine:
    """Two ends that are joined over QUIC; the line owns both from here on."""

    one: socket.socket
    other: socket.socket


@frozen
class Splicing:
    """How the two processes copy."""

    library: Path | None = None
    """libmesh-splice; without it their event loops do it."""
    busy_s: float = 0.0
    """That both event loops are held up every ten milliseconds, as by a node's other work."""
    relay: str | None = None
    """A relay's URL: the only way between the two."""
    there: Conditions = OPEN
    """Of QUIC's packets, from the first end of every line to the other; and back. Instead of a relay.

    Linux alone can cut off the way past the relay or past these conditions, which iroh would find.
    """
    back: Conditions = OPEN


class QuicLines:
    """Running lines."""

    def __init__(self, children: Sequence[_Conversation]) -> None:
        self._children = children

    async def cpu_s(self) -> float:
        """CPU time of both processes until now."""
        return sum([float((await child.ask({}))["cpu_s"]) for child in self._children])


@asynccontextmanager
async def quic_lines(lines: Sequence[QuicLine], splicing: Splicing | None = None) -> AsyncIterator[QuicLines]:
    splicing = splicing or Splicing()
    ones, others = [line.one for line in lines], [line.other for line in lines]
    async with AsyncExitStack() as stack:
        for end in (*ones, *others):
            stack.callback(end.close)
        accepting = await stack.enter_async_context(_process(ones))
        connecting = await stack.enter_async_context(_process(others))
        common = {
            "library": str(splicing.library) if splicing.library else None,
            "busy_s": splicing.busy_s,
            "relay": splicing.relay,
        }
        met = await accepting.ask({**common, "links": [end.fileno() for end in ones], "ticket": None})
        request = {**common, "links": [end.fileno() for end in others], "ticket": met["ticket"]}
        if not (splicing.there.is_open and splicing.back.is_open):
            request["door"] = await stack.enter_async_context(_slow_door(met["port"], splicing))
        for answer in (await connecting.ask(request), await accepting.ask({})):
            if not answer.get("joined"):
                raise MeshError("two processes of the lab did not find each other")
        # They have copies of their own. With ours open, nobody would notice that they died.
        for end in (*ones, *others):
            end.close()
        yield QuicLines((accepting, connecting))


@asynccontextmanager
async def _slow_door(port: int, splicing: Splicing) -> AsyncIterator[int]:
    """A line to the endpoint that accepts; the port at which it is found."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("127.0.0.1", 0))
    door: int = listener.getsockname()[1]
    target = "127.0.0.1", port
    # Those who connect have the other ends: what they send is on its way back.
    slow = DelayDoor(listener=listener, target=target, there=splicing.back, back=splicing.there)
    async with delay_lines((), [slow]):
        yield door


class _Conversation:
    """A line in, a line out."""

    def __init__(self, child: Child, lines: asyncio.Queue[str]) -> None:
        self._child = child
        self._lines = lines

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._child.send(json.dumps(request).encode() + b"\n", close=False)
                answer: dict[str, Any] = json.loads(await self._lines.get())
                return answer
        except TimeoutError:
            said = " / ".join(list(self._child.recent)[-3:])
            raise MeshError(f"a process of the lab says nothing: {said}") from None


@asynccontextmanager
async def _process(ends: Sequence[socket.socket]) -> AsyncIterator[_Conversation]:
    lines = asyncio.Queue[str](maxsize=64)
    async with spawn(
        module("mesh_llm.lab.quic"),
        on_stdout=lines.put_nowait,
        on_stderr=lambda _: None,
        pass_fds=[end.fileno() for end in ends],
    ) as child:
        yield _Conversation(child, lines)


# -- in the processes ---------------------------------------------------------------------------


async def loopback_endpoint(relay: str | None = None) -> Endpoint:
    """An endpoint that never sends a packet beyond this machine; with a relay, none but through it."""
    iroh_ffi.uniffi_set_event_loop(asyncio.get_running_loop())
    mode = RelayMode.disabled()
    if relay is not None:
        relays = RelayMap.empty()
        relays.insert(RelayConfig(url=relay))
        mode = RelayMode.custom(relays)
    endpoint = await Endpoint.bind(
        EndpointOptions(preset=preset_minimal(), bind_addr="127.0.0.1:0", alpns=[_ALPN], relay_mode=mode)
    )
    if relay is not None:
        _hear_only(None)
    return endpoint


def _hear_only(port: int | None) -> None:
    """UDP sockets of this process get packets from that port alone, or none: iroh would find a better way.

    A filter is attached to each (BPF): load the source port, compare, take all of the packet or nothing.
    """
    load, compare, give = 0x28, 0x15, 0x06
    take, drop = (give, 0, 0, 0xFFFFFFFF), (give, 0, 0, 0)
    steps = [drop] if port is None else [(load, 0, 0, 0), (compare, 0, 1, port), take, drop]
    program = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *step) for step in steps))
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # closed since: the folder's own descriptor, and perhaps another thread's
        if not target.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as end:
            if end.type == socket.SOCK_DGRAM:
                filter = struct.pack("@HP", len(steps), ctypes.addressof(program))
                end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)


async def accept(endpoint: Endpoint) -> Connection:
    incoming = await endpoint.accept_next()
    assert incoming is not None, "the endpoint was closed"
    return await (await incoming.accept()).connect()


async def connect(
    endpoint: Endpoint, ticket: str, *, relay: str | None = None, door: int | None = None
) -> Connection:
    """Through a relay, or a line's door at that port, where there is one."""
    address = EndpointTicket.from_string(ticket).endpoint_addr()
    if relay is not None:
        address = EndpointAddr(address.id(), relay, [])
    if door is not None:
        address = EndpointAddr(address.id(), None, [f"127.0.0.1:{door}"])
        _hear_only(door)
    return await endpoint.connect(address, _ALPN)


def ticket_of(endpoint: Endpoint) -> str:
    return str(EndpointTicket.from_addr(endpoint.addr()))


def _port_of(endpoint: Endpoint) -> int:
    """Of its socket on 127.0.0.1."""
    bound = (text.rpartition(":") for text in endpoint.bound_sockets())
    return next(int(port) for host, _, port in bound if host == "127.0.0.1")


def main() -> None:
    iroh()  # with its slow piece replaced
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())


async def _serve() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    request = json.loads(await reader.readline())
    links = [socket.socket(fileno=number) for number in request["links"]]
    endpoint = await loopback_endpoint(request["relay"])
    if request["ticket"] is None:
        _say(ticket=ticket_of(endpoint), port=_port_of(endpoint))
        streams = await _accept_streams(await accept(endpoint), len(links))
        # The question whether they are joined comes after the other side has been told to connect.
        await reader.readline()
    else:
        streams = await _open_streams(
            await connect(endpoint, request["ticket"], relay=request["relay"], door=request.get("door")),
            len(links),
        )
    splicer: Splicer | None = load_native(Path(request["library"]) if request["library"] else None)
    work: list[asyncio.Task[Any]] = [
        asyncio.create_task(
            splice(link, stream.send(), stream.recv(), splicer=splicer), name=f"line {number}"
        )
        for number, (link, stream) in enumerate(zip(links, streams, strict=True))
    ]
    if request["busy_s"]:
        work.append(asyncio.create_task(_be_busy(request["busy_s"]), name="busy"))
    _say(joined=True)
    while await reader.readline():
        _say(cpu_s=time.process_time())
    for task in work:
        task.cancel()
    await asyncio.wait(work)
    await endpoint.close()


async def _open_streams(connection: Connection, count: int) -> list[BiStream]:
    streams = [await connection.open_bi() for _ in range(count)]
    for number, stream in enumerate(streams):
        # The peer learns of a stream by what is sent on it.
        await stream.send().write_all(number.to_bytes(2))
    return streams


async def _accept_streams(connection: Connection, count: int) -> list[BiStream]:
    streams: dict[int, BiStream] = {}
    for _ in range(count):
        stream = await connection.accept_bi()
        streams[int.from_bytes(await stream.recv().read_exact(2))] = stream
    return [streams[number] for number in range(count)]


async def _be_busy(busy_s: float) -> None:
    while True:
        until = time.perf_counter() + busy_s
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.01 - busy_s)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
