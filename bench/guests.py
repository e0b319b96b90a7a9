"""A mesh as guests meet it: a host, another node that computes nothing, and a lite client, of one tree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench import servers
from bench.revision import Tree
from bench.servers import ObservedServer
from mesh_llm.bench.servers import Server
from mesh_llm.errors import MeshError

HOST, NODE, CLIENT = DOORS = ("the host", "another node", "a lite client")
"""Whom a guest may ask."""

_SERVES_S = 60.0
"""From the first line of a node that has joined until it knows where the engine is."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Guests:
    host: ObservedServer
    node: Server
    client: Server

    @property
    def doors(self) -> dict[str, Server]:
        return {HOST: self.host.node, NODE: self.node, CLIENT: self.client}


@asynccontextmanager
async def guests(tree: Tree, *options: str) -> AsyncIterator[Guests]:
    """`options` are the host's. Each of the three has a home of its own."""
    async with AsyncExitStack() as stack:
        homes = [stack.enter_context(servers.fresh_home()) for _ in range(3)]
        host = await stack.enter_async_context(servers.observed_node(homes[0], *options, tree=tree))

        async def joined(role: str, home: Path, *own: str) -> Server:
            join = ("--join", await _token(tree, homes[0], role))
            return await stack.enter_async_context(servers.node(home, *join, *own, tree=tree))

        node = await joined("node", homes[1], "--hosting", "never", "--no-fetch")
        found = Guests(host=host, node=node, client=await joined("client", homes[2], "--client"))
        for name, server in found.doors.items():
            await _until_serving(server, f"{name} of {tree.name} ({tree.commit})")
        yield found


async def _token(tree: Tree, home: Path, role: str) -> str:
    said = await tree.run("invite", "--role", role, "--home", str(home), "--json")
    return str(json.loads("".join(said.output))["token"])


async def _until_serving(server: Server, name: str) -> None:
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(_SERVES_S):
                while True:
                    async with session.get(server.url + "/health") as reply:
                        if reply.status == 200:
                            return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise MeshError(f"{name} did not serve within {_SERVES_S:.0f} s") from None
