"""Two iroh endpoints on loopback, connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from iroh.iroh_ffi import BiStream, Connection

from mesh_llm.lab.quic import accept, connect, loopback_endpoint, ticket_of
from mesh_llm.transport.iroh_library import iroh

SETUP_S = 20.0
"""For what takes milliseconds, on a machine that is busy with something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Both sides of one connection."""

    near: Connection
    far: Connection

    async def stream(self) -> tuple[BiStream, BiStream]:
        """Both ends of a new stream."""
        async with asyncio.timeout(SETUP_S):
            near = await self.near.open_bi()
            # The other side learns of a stream by what is sent on it.
            await near.send().write_all(b"!")
            far = await self.far.accept_bi()
            assert await far.recv().read_exact(1) == b"!"
            return near, far


@asynccontextmanager
async def joined_endpoints() -> AsyncIterator[Joined]:
    iroh()
    near, far = await loopback_endpoint(), await loopback_endpoint()
    try:
        async with asyncio.timeout(SETUP_S):
            accepting = asyncio.create_task(accept(far), name="accept")
            near_connection = await connect(near, ticket_of(far))
            joined = Joined(near=near_connection, far=await accepting)
        yield joined
    finally:
        async with asyncio.timeout(SETUP_S):
            await near.close()
            await far.close()
