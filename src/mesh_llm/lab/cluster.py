"""A mesh on one machine: real nodes, each a process with a home of its own.

    async with cluster(ClusterSpec(home=folder, nodes=3), tell=print, progress=...) as mesh:
        status = await mesh.until_serving()
        ...

The first node has the cluster's home itself, so that `mesh-llm status --home` and
`stop` find it there; the others live in folders below. Nothing listens beyond
loopback. However the block or its process ends, so do the nodes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.cli.control import call
from mesh_llm.defaults import CLUSTER_READY_S
from mesh_llm.engine import machine
from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home
from mesh_llm.lab.member import MemberPart
from mesh_llm.tasks import meanwhile, uninterrupted
from mesh_llm.transport.identity import Identity
from mesh_llm.types import Event, EventSink, NodeId, Progress, ProgressSink

CLUSTER_STOP_S = 15.0
"""For all nodes of a local cluster to drain and end; those that do not are killed."""
CLUSTER_HURRY_S = 5.0
"""The same without finishing answers."""
CLUSTER_SETTLE_S = 5.0
"""A plan without some of them that nothing changes for so long is the one there will be."""
CLUSTER_POLL_S = 0.05
"""Between two looks at whether they serve together."""


NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TOKEN = "Invite token: "


@frozen
class ClusterSpec:
    home: Path
    model: str | None = None
    nodes: int = 3
    port: int = 0
    """Of the first node's API; the others take any free one."""
    latency_s: tuple[float, ...] = ()
    """One way: of every link, or of each further node to the first. Two others are as far apart
    as the farther of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= len(NAMES):
            raise UsageError(f"--nodes {self.nodes}: between 1 and {len(NAMES)}")
        if len(self.latency_s) not in (0, 1, self.nodes - 1):
            raise UsageError(
                f"--latency has {len(self.latency_s)} values for {self.nodes - 1} nodes after the first",
                hint="give one for all of them, or one for each",
            )

    def homes(self) -> list[Home]:
        return [Home(self.home), *(Home(self.home / name) for name in NAMES[1 : self.nodes])]

    def distances_s(self) -> list[float]:
        """Of each node to the first."""
        given = self.latency_s or (0.0,)
        return [0.0, *(given * (self.nodes - 1) if len(given) == 1 else given)]


class ClusterMember:
    """One node's process, and what it has told."""

    def __init__(self, name: str, tell: EventSink, progress: ProgressSink) -> None:
        self.name = name
        self.child: Child | None = None
        self.token: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failure: MeshError | None = None
        self._tell = tell
        self._progress = progress

    def on_line(self, line: str) -> None:
        document = json.loads(line)
        if "event" in document:
            event = Event(kind=document["event"], text=document["text"])
            if event.kind == "invite" and not self.token.done():
                self.token.set_result(event.text.removeprefix(_TOKEN))
            self._tell(event)
        elif "progress" in document:
            self._progress(Progress(**document["progress"]))
        elif "failed" in document:
            self.failure = MeshError(document["failed"], hint=document["hint"])

    async def ended(self) -> None:
        assert self.child is not None
        await self.child.wait()

    def why(self) -> MeshError:
        """Why it has ended, where nobody asked it to."""
        if self.failure is not None:
            return self.failure
        last = " / ".join(list(self.child.recent)[-3:]) if self.child is not None else ""
        return MeshError(f"node {self.name} ended: {last}")


class Cluster:
    def __init__(self, spec: ClusterSpec, members: Sequence[ClusterMember]) -> None:
        self.spec = spec
        self.members = tuple(members)

    async def status(self) -> dict[str, Any]:
        return await call(Home(self.spec.home), "GET", "/api/status")

    async def until_serving(self) -> dict[str, Any]:
        """The status as soon as all nodes serve together, or those that can."""
        ended = [asyncio.create_task(member.ended(), name=member.name) for member in self.members]
        settling = _Settling(len(self.members))
        try:
            async with asyncio.timeout(CLUSTER_READY_S):
                while True:
                    for member, task in zip(self.members, ended, strict=True):
                        if task.done():
                            raise member.why()
                    document = await self.status()
                    if settling.is_over(document, asyncio.get_running_loop().time()):
                        return document
                    await asyncio.sleep(CLUSTER_POLL_S)
        except TimeoutError:
            raise MeshError(f"the nodes did not serve together within {CLUSTER_READY_S:.0f} s") from None
        finally:
            for task in ended:
                task.cancel()

    async def ended(self) -> None:
        """Returns when the first node does: somebody stopped it. Others may come and go."""
        await self.members[0].ended()
        if self.members[0].failure is not None:
            raise self.members[0].failure


class _Settling:
    """Tells a plan that is what it will be from one that waits for the last node."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: object = None
        self._since = 0.0

    def is_over(self, document: dict[str, Any], now: float) -> bool:
        state, plan, nodes = document["node"]["state"], document["plan"], document["mesh"]["nodes"]
        if plan is None:
            return False
        if state == "serving" and len(plan["stages"]) == self._count:
            return True
        seen = (state, plan["epoch"], len(plan["stages"]), [(node["id"], node["state"]) for node in nodes])
        if seen != self._seen:
            self._seen, self._since = seen, now
        here = len(nodes) == self._count and all(node["state"] != "starting" for node in nodes)
        if not here or now - self._since < CLUSTER_SETTLE_S:
            return False
        if state == "waiting":
            raise MeshError(
                f"this machine cannot serve it: {plan['reason']}",
                hint="choose a smaller model, or fewer nodes",
            )
        return bool(state == "serving")


@asynccontextmanager
async def cluster(
    spec: ClusterSpec, *, tell: EventSink, progress: ProgressSink, hurry: asyncio.Event | None = None
) -> AsyncIterator[Cluster]:
    """Nodes that have joined each other, or are about to. `tell` hears the first node alone.

    Once `hurry` is set, they end without finishing answers.
    """
    parts = _parts(spec)
    async with AsyncExitStack() as stack:
        members: list[ClusterMember] = []
        for name in NAMES[: spec.nodes]:
            first = not members
            member = ClusterMember(name, tell if first else _ignore, progress if first else _ignore)
            members.append(member)
            # All at once: those that join load their modules while the first one makes the mesh.
            member.child = await stack.enter_async_context(
                spawn(module("mesh_llm.lab.member"), on_stdout=member.on_line, on_stderr=lambda _: None)
            )
        try:
            await _send(members[0], parts[0])
            token = await _token(members[0])
            for member, part in zip(members[1:], parts[1:], strict=True):
                await _send(member, replace(part, join=token))
            yield Cluster(spec, members)
        finally:
            # A task of its own: cancelled half-way, it would leave nodes to be killed, with their sockets.
            await uninterrupted(_stop(members, hurry or asyncio.Event()), "end of the cluster")


def _parts(spec: ClusterSpec) -> list[MemberPart]:
    homes, distances = spec.homes(), spec.distances_s()
    ids: list[NodeId] = []
    for home in homes:
        home.create()
        ids.append(Identity.from_secret(home.secret()).id)
    threads = max(1, machine.threads() // spec.nodes)
    return [
        MemberPart(
            home=str(homes[index].path),
            name=NAMES[index],
            model=spec.model,
            port=spec.port if index == 0 else 0,
            threads=threads,
            hosts=index == 0,
            split=index == 0 and spec.nodes > 1,
            delays_s={
                ids[other]: max(distances[index], distances[other])
                for other in range(spec.nodes)
                if other != index
            },
        )
        for index in range(spec.nodes)
    ]


async def _send(member: ClusterMember, part: MemberPart) -> None:
    assert member.child is not None
    await member.child.send(part.to_line(), close=False)


async def _token(member: ClusterMember) -> str:
    ended = asyncio.create_task(member.ended(), name="first node")
    try:
        await asyncio.wait(
            (ended, member.token), timeout=CLUSTER_READY_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not member.token.done():
            if ended.done():
                raise member.why()
            raise MeshError(f"the first node was not ready within {CLUSTER_READY_S:.0f} s")
        return member.token.result()
    finally:
        ended.cancel()


async def _stop(members: Sequence[ClusterMember], hurry: asyncio.Event) -> None:
    """Ask all of them to stop, and give them time to; the end of the block does the rest."""
    async with AsyncExitStack() as stack:
        ends = [
            await stack.enter_async_context(meanwhile(member.ended(), f"end of {member.name}"))
            for member in members
        ]
        hurried = await stack.enter_async_context(meanwhile(hurry.wait(), "hurry"))
        ended = await stack.enter_async_context(meanwhile(_all(ends), "end of all"))
        await _send_all(members, b"stop\n", close=False)
        await asyncio.wait((ended, hurried), timeout=CLUSTER_STOP_S, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            # The end of its input ends a node at once, but in order: killed, it would leave its sockets.
            await _send_all(members, b"", close=True)
            await asyncio.wait((ended,), timeout=CLUSTER_HURRY_S)


async def _all(ends: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(ends)


async def _send_all(members: Sequence[ClusterMember], data: bytes, *, close: bool) -> None:
    for member in members:
        assert member.child is not None
        await member.child.send(data, close=close)


def _ignore(_: object) -> None:
    """Of further nodes: what the first one tells is enough for people."""
