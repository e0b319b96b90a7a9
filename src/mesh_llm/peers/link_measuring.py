"""Links that are only measured: to other members, and from them.

A member asks with a data link whose purpose is `measure`; a node that is older refuses it as one that does
not exist. What a node answers is bounded: two links at a time, each in bytes and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mesh_llm.errors import LinkFailed, LinkRefused, MeshError, UsageError
from mesh_llm.membership.member import called
from mesh_llm.peers.data_links import DataLinks, Purpose, Receive
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport import link_meter
from mesh_llm.transport.link_meter import MESSAGE_LIMIT_BYTES, LinkMeter
from mesh_llm.types import LinkKind, NodeId, Role

T = TypeVar("T")

KINDS = (LinkKind.LOCAL, LinkKind.TCP, LinkKind.QUIC, LinkKind.RELAY)
LINKS_AT_ONCE = 2
"""That a node answers: the one that is measured, and the one that keeps it busy meanwhile."""
_PURPOSE: Purpose = {"kind": "measure"}
_BUSY = "the other node's links are being measured already; try again in half a minute"
_TRIES, _TRY_S = 10, 0.2
_STARTS_S = 20.0
"""A node that has just joined tells within that on which machine it is."""
_WARM_UP = 3
_ROUNDS = 200
_ROUND_TRIPS_S = 0.5
_ROUNDS_BYTES = 128 << 20
_PUSHES = 2000
_PUSH_BYTES = 64 << 20
_PUSH_S = 1.0
_SLOW_S = 0.3
"""What takes longer is measured once: all of it has to end before who asked gives up."""
_BUSY_LONGEST_S = 0.1
"""What takes longer is not measured beside a busy link: there it can take twenty times as long."""
_BULK_BYTES = 256 << 10
"""Of each message of what keeps a link busy."""


class MeasuredLinks:
    def __init__(self, mesh: Mesh, otherwise: Receive) -> None:
        self._mesh = mesh
        self._otherwise = otherwise
        """Takes links for any other purpose."""
        self._answering = 0

    async def receive(self, origin: NodeId, purpose: Purpose, link: socket.socket) -> None:
        if purpose.get("kind") != _PURPOSE["kind"]:
            await self._otherwise(origin, purpose, link)
            return
        if self._answering >= LINKS_AT_ONCE:
            link.close()
            raise LinkRefused(_BUSY)
        self._answering += 1
        in_thread(lambda: link_meter.answer(link)).add_done_callback(self._on_answered)

    def _on_answered(self, _: object) -> None:
        self._answering -= 1

    async def measure(self, links: DataLinks, asked: dict[str, Any]) -> dict[str, Any]:
        """What `POST /api/measure` answers: which kinds there are, or the figures of one for one size."""
        node = self._found(str(asked.get("node")))
        await self._started(node)
        if (kind := asked.get("kind")) is None:
            why_not = {kind.value: links.why_not(node, kind) for kind in KINDS}
            return {"name": self._mesh.name_of(node), "why_not": why_not}
        size = asked.get("size")
        if kind not in set(KINDS) or type(size) is not int or not 1 <= size <= MESSAGE_LIMIT_BYTES:
            raise UsageError(f"a measurement needs a kind of link, and a size up to {MESSAGE_LIMIT_BYTES}")
        async with contextlib.AsyncExitStack() as stack:
            meters = []
            for _ in range(LINKS_AT_ONCE):
                meters.append(stack.enter_context(LinkMeter(await self._link(links, node, LinkKind(kind)))))
            return await in_thread(lambda: figures(meters[0], meters[1], size))

    async def _started(self, node: NodeId) -> None:
        """A path is known once both nodes have told their machine; without that it counts as another one."""
        deadline = time.monotonic() + _STARTS_S
        while time.monotonic() < deadline:
            member = self._mesh.member(node)
            if member is None or (member.facts.machine and self._mesh.facts.machine):
                return
            await asyncio.sleep(_TRY_S)

    async def _link(self, links: DataLinks, node: NodeId, kind: LinkKind) -> socket.socket:
        for left in reversed(range(_TRIES)):
            try:
                return await links.link_of(node, _PURPOSE, kind)
            except LinkRefused as error:
                if error.message == "this link does not exist":
                    name = self._mesh.name_of(node)
                    raise LinkRefused(f"{name} is too old to be measured", hint="update it") from None
                if error.message != _BUSY or not left:
                    raise
            # The other node may not have noticed yet that the links before these have ended.
            await asyncio.sleep(_TRY_S)
        raise AssertionError("the last try raises")

    def _found(self, name: str) -> NodeId:
        others = (m for m in self._mesh.alive() if m.id != self._mesh.me)
        found = called(name, others, nodes_first=True)
        if len(found) != 1:
            raise MeshError(
                f"{len(found) or 'no'} other members are called {name!r}",
                hint="`mesh-llm status` lists them",
            )
        if self._mesh.facts.role is Role.CLIENT or found[0].facts.role is Role.CLIENT:
            raise MeshError("a lite client has no data links")
        return found[0].id


def figures(meter: LinkMeter, other: LinkMeter, size: int) -> dict[str, Any]:
    """Of messages of one size: idle, and while `other` sends all it can."""
    # The first one of all waits for the other end to begin.
    first_s = min(meter.round_trips(size, _WARM_UP))
    idle_s = meter.round_trips(size, _rounds(size, first_s))
    pushes = min(_PUSHES, int(_PUSH_S / first_s) + 1, max(1, _PUSH_BYTES // size))
    bytes_s = [meter.bytes_s(size, pushes) for _ in range(3 if first_s < _SLOW_S else 1)]
    busy_s = _beside(meter, other, size) if first_s < _BUSY_LONGEST_S else []
    return {"size": size, "idle_s": idle_s, "busy_s": busy_s, "bytes_s": bytes_s}


def _beside(meter: LinkMeter, other: LinkMeter, size: int) -> list[float]:
    """Round trips while `other` is busy."""
    over = threading.Event()
    pushing = threading.Thread(target=_push, args=(other, over), daemon=True)
    pushing.start()
    try:
        first_s = meter.round_trips(size, 1)[0]
        return [first_s] if first_s > _SLOW_S else meter.round_trips(size, _rounds(size, first_s))
    finally:
        over.set()
        pushing.join()


def _rounds(size: int, one_s: float) -> int:
    return max(2, min(_ROUNDS, int(_ROUND_TRIPS_S / one_s), _ROUNDS_BYTES // size))


def _push(meter: LinkMeter, over: threading.Event) -> None:
    with contextlib.suppress(LinkFailed, OSError):
        while not over.is_set():
            meter.bytes_s(_BULK_BYTES, 2)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        # The loop may have ended meanwhile, and nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it())

    def run() -> None:
        try:
            found = work()
        except Exception as error:
            tell(lambda error=error: done.set_exception(error))  # type: ignore[misc]
        else:
            tell(lambda: done.set_result(found))

    threading.Thread(target=run, daemon=True).start()
    return done
