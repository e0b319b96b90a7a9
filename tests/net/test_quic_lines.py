"""QUIC between two processes of this machine, over a slow and lossy line, and over a relay."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time

import pytest

from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.quic import QuicLine, Splicing, quic_lines
from tests.support.relay_peer import relay, url

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can cut off a direct path")
WAIT_S = 30.0


async def drive(splicing: Splicing, *, size: int, rounds: int) -> float:
    """The least round trip, after as many bytes have come whole as were sent."""
    near, near_link = socket.socketpair()
    far, far_link = socket.socketpair()
    data = random.Random(1).randbytes(size)
    with near, far:
        for end in (near, far):
            end.settimeout(WAIT_S)

        def receive() -> bytes:
            found = bytearray()
            while len(found) < size:
                found += far.recv(1 << 16)
            return bytes(found)

        def round_trip_s() -> float:
            began = time.perf_counter()
            near.sendall(b"token")
            far.sendall(far.recv(5, socket.MSG_WAITALL))
            near.recv(5, socket.MSG_WAITALL)
            return time.perf_counter() - began

        async with quic_lines([QuicLine(one=near_link, other=far_link)], splicing):
            sending = asyncio.create_task(asyncio.to_thread(near.sendall, data))
            assert await asyncio.to_thread(receive) == data
            await sending
            return min([await asyncio.to_thread(round_trip_s) for _ in range(rounds)])


async def test_conditions_hold_for_quics_packets() -> None:
    """Long enough for the two endpoints to find the direct path, if it were not cut off."""
    slow = Splicing(
        there=Conditions(delay_s=0.02, loss=0.02), back=Conditions(delay_s=0.03, jitter_s=0.005, loss=0.02)
    )
    assert 0.045 <= await drive(slow, size=500_000, rounds=30) < 2.0


async def test_a_relay_stays_the_only_way() -> None:
    async with relay() as server:
        await drive(Splicing(relay=url(server)), size=200_000, rounds=200)
        assert server.counters.delivered > 200
