"""Joins a mesh with wrong tokens, many at once, until it is ended. Run it on a host of its own.

    python flood.py TOKEN COUNT

Prints a line for each answer that came.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import replace
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, decode
from mesh_llm.transport.network import Membership, Network, NetworkConfig
from mesh_llm.types import NodeId, Role


class Nobody:
    """What a network tells somebody who never gets in."""

    def on_peer(self, peer: Any) -> None:
        print("admitted", flush=True)

    def on_lost(self, peer: Any, reason: str) -> None: ...

    def on_message(self, peer: Any, body: dict[str, Any]) -> None:
        print("told something", flush=True)

    async def on_stream(self, peer: Any, kind: str, header: dict[str, Any], stream: Any) -> None: ...

    def kinds_for(self, role: Role) -> frozenset[str]:
        return frozenset()

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        return {}

    def on_duplicate(self) -> None: ...

    def on_refused(self, node: Any, reason: str) -> None: ...

    def on_address(self) -> None: ...


async def attack(invite: Invite) -> None:
    """One stranger: each attempt with another secret."""
    identity = Identity.from_secret(secrets.token_bytes(32))
    network = Network(NetworkConfig(identity=identity, no_relay=True), Membership(), Nobody())
    await network.start()
    while True:
        try:
            await network.join(replace(invite, secret=secrets.token_bytes(16)), timeout_s=10)
        except MeshError as error:
            print(error.message, flush=True)


async def main(token: str, count: int) -> None:
    invite = decode(token)
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(attack(invite))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
