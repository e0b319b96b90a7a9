"""The nodes of a run. Each is a process with a home of its own; all end with the run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from mesh_llm.cli.control import call
from mesh_llm.defaults import CLUSTER_READY_S
from mesh_llm.engine import build, machine
from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.lab.chaos import processes
from mesh_llm.lab.chaos.member import StruckPart
from mesh_llm.lab.chaos.records import ChaosLog
from mesh_llm.lab.chaos.schedule import NODES
from mesh_llm.local.hardware import without_cpu_library
from mesh_llm.tasks import cancelled
from mesh_llm.transport.identity import Identity

CLIENT = "client"
"""The lite client, which nothing is done to: most questions are asked there."""
STOP_S = 60.0
"""For a node to end after it was told to: others take over, open answers end."""
READY_S = 90.0
"""For a node to take part again after it was started."""
POLL_S = 0.1
NEXT_VERSION = "99.0.0"

_PACKAGE = Path(__file__).parents[2]


class ChaosMember:
    def __init__(self, name: str, home: Home, *, child: Child, task: asyncio.Task[None]) -> None:
        self.name = name
        self.home = home
        self.id = Identity.from_secret(home.secret()).id
        self.child = child
        self.task = task
        self.is_ready = False
        self.url = ""
        self.failure = ""
        """What it said last, where it failed."""

    @property
    def pid(self) -> int:
        return self.child.pid

    async def status(self) -> dict[str, Any]:
        return await call(self.home, "GET", "/api/status")

    async def tell(self, **world: object) -> None:
        await self.child.send(json.dumps(world).encode() + b"\n", close=False)


class ChaosMesh:
    """Made by `chaos_mesh`."""

    def __init__(self, folder: Path, log: ChaosLog, *, model: str | None, embeddings: bool) -> None:
        self._folder = folder
        self._log = log
        self._model = model
        self._embeddings = embeddings
        self._newer: Path | None = None
        self._generation: dict[str, int] = {}
        self.mark = folder.name
        self.members: dict[str, ChaosMember] = {}
        """Those whose processes run, by name."""
        self.struck: set[str] = set()
        """Nodes that a fault is being done to."""
        self._cut: frozenset[str] = frozenset()
        """Ids of those that nobody reaches."""

    # -- who runs --------------------------------------------------------------------------------

    async def create(self) -> None:
        """Three nodes of which two are owners, and a lite client."""
        await self.start(NODES[0])
        await self.until_ready(NODES[0], within_s=CLUSTER_READY_S)
        for name in (*NODES[1:], CLIENT):
            await self.start(name, token=await self.token("client" if name == CLIENT else "node"))
        for name in (*NODES[1:], CLIENT):
            await self.until_ready(name)
        await call(self.members[NODES[0]].home, "POST", "/api/promote", {"name": self.members[NODES[1]].id})

    async def start(self, name: str, *, token: str | None = None, newer: bool = False) -> ChaosMember:
        """With a token: on a new home. Without: on the one that it had."""
        if token is not None or name not in self._generation:
            self._generation[name] = self._generation.get(name, 0) + 1
        home = Home(self._folder / f"{name}{self._generation[name]}")
        home.create()
        part = StruckPart(
            home=str(home.path),
            name=name,
            model=self._model if name == NODES[0] else None,
            port=0,
            threads=max(1, machine.threads() // len(NODES)),
            hosts=False,
            split=name == NODES[0],
            join=token,
            client=name == CLIENT,
            embeddings=self._embeddings and name == NODES[0],
        )
        started: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        env = {processes.MARK: self.mark} | ({"PYTHONPATH": str(self._other_version())} if newer else {})
        task = asyncio.create_task(self._live(name, part, env, started), name=f"member {name}")
        await asyncio.wait((started, task), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            # It raises what kept it from being started.
            await task
        member = ChaosMember(name, home, child=started.result(), task=task)
        self.members[name] = member
        self._log.write("member", name=name, id=member.id, phase="started", pid=member.pid)
        if self._cut:
            await self._tell_of_cuts()
        return member

    async def _live(
        self, name: str, part: StruckPart, env: dict[str, str], started: asyncio.Future[Child]
    ) -> None:
        def on_line(line: str) -> None:
            document = json.loads(line)
            if "told" in document:
                at = self._log.since(document["at"])
                self._log.write("told", at=at, name=name, text=document["told"][:300])
            elif "failed" in document and (member := self.members.get(name)) is not None:
                member.failure = document["failed"]

        argv = module("mesh_llm.lab.chaos.member")
        async with spawn(argv, on_stdout=on_line, on_stderr=lambda _: None, env=env) as child:
            await child.send(part.to_line(), close=False)
            started.set_result(child)
            status = await child.wait()
        member = self.members.get(name)
        if member is not None and member.child is child:
            del self.members[name]
            self._log.write(
                "member", name=name, id=member.id, phase="gone", status=status, failure=member.failure
            )

    def _other_version(self) -> Path:
        """A copy of this package that says it is a later one: the same code, so that what is tried is the way
        of an upgrade, and not how code of two versions gets along."""
        if self._newer is None:
            copy = self._folder / "src" / "mesh_llm"
            shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            native = native_folder()
            assert native is not None, "such faults are left out"
            (self._folder / "native").symlink_to(native)
            init = copy / "__init__.py"
            text = re.sub(
                r'__version__ = "[^"]+"', f'__version__ = "{NEXT_VERSION}"', init.read_text("utf-8")
            )
            init.write_text(text, "utf-8")
            self._newer = copy.parent
        return self._newer

    async def until_ready(self, name: str, *, within_s: float = READY_S) -> None:
        """Until it says that it takes part, in whatever way."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    member = self.members.get(name)
                    if member is None:
                        raise MeshError(f"node {name} ended while it was started")
                    with suppress(MeshError):
                        document = await member.status()
                        if document["node"]["state"] not in ("starting", "failed") and document["api"]["url"]:
                            member.url, member.is_ready = document["api"]["url"], True
                            self._log.write("member", name=name, id=member.id, phase="ready", pid=member.pid)
                            return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise MeshError(f"node {name} was not ready within {within_s:.0f} s") from None

    async def cut_off(self, id: str) -> None:
        self._cut |= {id}
        await self._tell_of_cuts()

    async def reconnect(self, id: str) -> None:
        self._cut -= {id}
        await self._tell_of_cuts()

    async def _tell_of_cuts(self) -> None:
        for member in list(self.members.values()):
            others = {each.id for each in self.members.values()} - {member.id}
            await member.tell(cut=sorted(others if member.id in self._cut else self._cut))

    async def kill(self, name: str) -> None:
        """As a machine that loses its power; its children have to go by themselves."""
        member = self._leaving(name)
        member.child.signal_group(signal.SIGKILL)
        await asyncio.wait((member.task,))

    async def stop(self, name: str) -> None:
        member = self._leaving(name)
        await member.child.send(b"stop\n", close=False)
        if not (await asyncio.wait((member.task,), timeout=STOP_S))[0]:
            await cancelled(member.task)
            raise MeshError(f"node {name} did not stop within {STOP_S:.0f} s")

    def _leaving(self, name: str) -> ChaosMember:
        member = self.members.get(name)
        if member is None:
            raise MeshError(f"node {name} is not running")
        member.is_ready = False
        return member

    # -- what they can be asked ------------------------------------------------------------------

    async def token(self, role: str = "node", *, but: str = "") -> str:
        """From whichever node answers."""
        for name in NODES:
            member = self.members.get(name)
            if member is not None and member.is_ready and name != but:
                with suppress(MeshError):
                    asked = {"role": role, "lifetime_s": 86400.0 * 30, "uses": 1}
                    return str((await call(member.home, "POST", "/api/invite", asked))["token"])
        raise MeshError("no node could make an invite")

    async def revoke(self, name: str) -> None:
        """By whichever owner answers."""
        member = self._leaving(name)
        for owner in NODES[:2]:
            if (other := self.members.get(owner)) is not None and other.is_ready:
                with suppress(MeshError):
                    await call(other.home, "POST", "/api/revoke", {"id": member.id})
                    self._log.write("member", name=name, id=member.id, phase="revoked")
                    return
        raise MeshError("no owner could revoke anything")

    async def host(self) -> ChaosMember | None:
        """Whoever hosts now, as far as any node knows."""
        for member in list(self.members.values()):
            if processes.children(member.pid, processes.ENGINE):
                return member
        return None

    async def is_whole(self) -> bool:
        """Whether all agree on one plan that serves, over all of them."""
        seen = set()
        for name, member in list(self.members.items()):
            with suppress(MeshError, KeyError, TypeError):
                document = await member.status()
                plan, members = document["plan"], document["mesh"]["nodes"]
                stages = frozenset(stage["node"] for stage in plan["stages"])
                if document["node"]["state"] == "serving" and len(members) == len(self.members):
                    seen.add((name, plan["epoch"], plan["host"], stages))
        nodes = {self.members[name].id for name in NODES if name in self.members}
        agreed = {each[1:] for each in seen}
        return (
            len(seen) == len(self.members) == len(NODES) + 1
            and len(agreed) == 1
            and agreed.pop()[2] == frozenset(nodes)
        )

    async def until_whole(self, *, within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not await self.is_whole():
                    await asyncio.sleep(POLL_S * 3)
                return True
        return False

    async def end(self) -> None:
        """All at once; what does not end by itself is killed."""
        members = list(self.members.values())
        for member in members:
            processes.resume(member.pid, family=True)
            await member.child.send(b"stop\n", close=False)
        if members:
            await asyncio.wait([member.task for member in members], timeout=STOP_S)
        for member in members:
            if not member.task.done():
                await cancelled(member.task)


def native_folder() -> Path | None:
    """Where another copy of this package finds the native sources; None where it cannot."""
    folder = _PACKAGE.parents[1] / "native"
    return folder if folder.is_dir() else None


@asynccontextmanager
async def chaos_mesh(
    folder: Path, log: ChaosLog, *, model: str | None, embeddings: bool, tell: Callable[[str], None]
) -> AsyncIterator[ChaosMesh]:
    # Before the first answer: with the engine's own code the next host may round differently.
    built = await build.ensure(build.STANDARD, lambda _: None)
    if "cpu" in built.missing:
        tell(without_cpu_library(built.missing["cpu"]))
    mesh = ChaosMesh(folder, log, model=model, embeddings=embeddings)
    try:
        tell("Starting three nodes and a lite client")
        await mesh.create()
        if not await mesh.until_whole(within_s=READY_S):
            raise MeshError(f"the nodes did not serve together within {READY_S:.0f} s")
        yield mesh
    finally:
        await mesh.end()
