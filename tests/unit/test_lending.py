"""What a worker tells while it brings layers into memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import LinkRefused
from mesh_llm.transport.network import Stream
from mesh_llm.types import Fingerprint, NodeId, Progress
from mesh_llm.worker.lending import Lease, Lending, Step, Terms, Weights

TERMS = Terms(epoch=1, fingerprint=Fingerprint("f" * 64), first=0, last=8, need_bytes=100)


class FakeStream:
    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    async def write_document(self, document: dict[str, Any]) -> None:
        self.written.append(document)


class FakeLender:
    """Says how far it is, and is done with the next breath."""

    socket = "worker.sock"

    def __init__(self, *dones: int, told: Callable[[], int]) -> None:
        self._dones = dones
        self._told = told

    async def add_model(self, *_: object) -> None: ...

    async def prepare(self, fingerprint: str, layers: tuple[int, int], step: Step) -> int:
        for count, done in enumerate(self._dones, 1):
            step(done, 100)
            async with asyncio.timeout(20):
                while self._told() < count:
                    await asyncio.sleep(0)
        step(100, 100)
        return 100


@pytest.mark.parametrize("dones", [(40,), (40, 100)])
async def test_layers_that_are_in_memory_are_under_way_no_more(
    dones: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []

    async def weights(terms: Terms, step: Step) -> Weights:
        return Weights(files=[Path("model.gguf")])

    def nothing(*_: object) -> None: ...

    lending = Lending(
        specify=cast(Any, nothing), weights=weights, on_change=nothing, tell=nothing, progress=told.append
    )

    async def worker(device: str) -> FakeLender:
        return FakeLender(*dones, told=lambda: len(told))

    monkeypatch.setattr(lending, "_worker", worker)
    stream = FakeStream()
    await lending._prepare(Lease(host=NodeId("a"), terms=TERMS), cast(Stream, stream))

    assert [(step.what, step.done, step.total) for step in told] == [
        ("Loading layers", 40, 100),
        ("Loading layers", 100, 100),
    ]
    assert stream.written[-1] == {"ready": True, "resident_bytes": 100}


def spec(device: str) -> WorkerSpec:
    socket = "second" if device == "CPU" else "first"
    return WorkerSpec(socket=socket, device=device, threads=1, quota_bytes=1, libraries={})


class FakeProcess:
    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.peers: list[int] = []
        self.death = asyncio.get_running_loop().create_future()

    async def add_peer(self, number: int, link: socket.socket) -> None:
        self.peers.append(number)


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> Lending:
    """Of a node that lends a GPU and main memory."""

    @asynccontextmanager
    async def lend(spec: WorkerSpec) -> AsyncIterator[FakeProcess]:
        yield FakeProcess(spec.socket)

    monkeypatch.setattr("mesh_llm.worker.lending.lend", lend)
    nothing = cast(Any, lambda *_: None)
    return Lending(specify=spec, weights=nothing, on_change=nothing, tell=nothing, progress=nothing)


async def test_each_device_has_a_child_of_its_own(lending: Lending) -> None:
    """A host of an older version names no device, and means the first."""
    first, named, second = [await lending._worker(device) for device in ("", "CUDA0", "CPU")]

    assert first is named is not second
    assert lending.starts == 2
    await lending.close()
    assert lending.worker_pids == []


async def test_devices_of_a_node_are_linked_to_each_other(lending: Lending) -> None:
    host = NodeId("a")
    leases = []
    for device in ("CUDA0", "CPU"):
        lease = Lease(host=host, terms=replace(TERMS, device=device), worker=await lending._worker(device))
        lending.leases.append(lease)
        leases.append(lending.lease_of(host, TERMS.epoch, device))

    await lending.join(leases[0], leases[1], 7)

    assert [cast(Any, lease.worker).peers for lease in leases] == [[7], [7]]
    with pytest.raises(LinkRefused):
        lending.lease_of(host, TERMS.epoch, "CUDA1")
    with pytest.raises(LinkRefused):
        await lending.join(leases[0], leases[0], 8)
    await lending.close()


async def test_old_children_end_with_their_leases(lending: Lending, monkeypatch: pytest.MonkeyPatch) -> None:
    leased, idle = [await lending._worker(device) for device in ("CUDA0", "CPU")]
    lease = Lease(host=NodeId("a"), terms=TERMS, worker=leased)
    lending.leases.append(lease)
    monkeypatch.setattr(lending, "_specify", lambda device: replace(spec(device), socket="third"))

    lending.renew()

    async with asyncio.timeout(20):
        while idle.socket in lending._children:
            await asyncio.sleep(0)
    new = await lending._worker("CUDA0")
    assert new is not leased
    assert set(lending._children) == {leased.socket, new.socket}
    await lending._end(lease)
    async with asyncio.timeout(20):
        while leased.socket in lending._children:
            await asyncio.sleep(0)
    assert await lending._worker("CUDA0") is new
    await lending.close()
    assert lending.deaths == 0


async def test_an_old_child_that_a_lease_is_about_to_get_stays(lending: Lending) -> None:
    worker = await lending._worker("CUDA0")
    lending.leases.append(Lease(host=NodeId("a"), terms=TERMS))

    lending.renew()
    await asyncio.sleep(0)

    assert await lending._worker("CUDA0") is worker
    await lending.close()
