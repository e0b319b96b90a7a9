"""What a worker tells while it brings layers into memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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


async def test_what_was_fetched_last_is_not_told_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would take it for progress, and the loading that follows for none."""

    async def weights(terms: Terms, step: Step) -> Weights:
        step(80, 80)
        return Weights(files=[Path("model.gguf")])

    told: list[Progress] = []

    async def worker(device: str) -> FakeLender:
        await asyncio.sleep(0.01)
        return FakeLender(40, told=lambda: len(told))

    nothing = cast(Any, lambda *_: None)
    lending = Lending(specify=nothing, weights=weights, on_change=nothing, tell=nothing, progress=told.append)
    monkeypatch.setattr(lending, "_worker", worker)
    stream = FakeStream()
    await lending._prepare(Lease(host=NodeId("a"), terms=TERMS), cast(Stream, stream))

    loading = [each for each in stream.written if "ready" not in each and not each.get("fetching")]
    assert loading == [{"done_bytes": 40, "total_bytes": 100}]


def spec(device: str) -> WorkerSpec:
    socket = "second" if device == "CPU" else "first"
    return WorkerSpec(socket=socket, device=device, threads=1, quota_bytes=1, libraries={})


class FakeProcess:
    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.peers: list[int] = []
        self.death = asyncio.get_running_loop().create_future()

    async def add_peer(self, number: int, link: socket.socket) -> None:
        await asyncio.sleep(0)
        self.peers.append(number)

    async def drop_peer(self, number: int) -> None:
        self.peers.remove(number)


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


async def leased(lending: Lending, **terms: Any) -> Lease:
    """By host `a`."""
    worker = await lending._worker("CUDA0")
    lease = Lease(host=NodeId("a"), terms=replace(TERMS, device="CUDA0", **terms), worker=worker)
    lending.leases.append(lease)
    return lease


def peers(lease: Lease) -> list[int]:
    return cast(list[int], cast(Any, lease.worker).peers)


async def links(lending: Lending, origin: str, number: int, *, epoch: int = 1) -> None:
    """A node says that its worker comes before the one that was leased to `a`."""
    ours, theirs = socket.socketpair()
    purpose = {"kind": "neighbour", "host": "a", "epoch": epoch, "number": number, "device": "CUDA0"}
    with ours:
        await lending.receive(NodeId(origin), purpose, theirs)


async def test_only_the_worker_before_it_links_to_a_worker(lending: Lending) -> None:
    first, second = (
        await leased(lending, before=NodeId("")),
        await leased(lending, epoch=2, before=NodeId("b")),
    )

    await links(lending, "b", 7, epoch=2)
    for origin, epoch in (("c", 2), ("", 1), ("b", 1), ("a", 1)):
        if origin:
            with pytest.raises(LinkRefused, match="only the worker with the layers before these"):
                await links(lending, origin, 8, epoch=epoch)
    assert peers(second) == [7]
    # Of one that comes again, the last one counts.
    await links(lending, "b", 9, epoch=2)
    assert peers(second) == [9]
    await lending._end(second)
    assert peers(first) == []
    await lending.close()


async def test_links_to_a_lease_of_an_older_host_are_few(lending: Lending) -> None:
    """It does not say who is to link, and any member may ask."""
    lease = await leased(lending)
    ours, theirs = socket.socketpair()
    with ours:
        await lending.add_next(lease, 1, theirs)

    async def puppet(number: int) -> None:
        with suppress(LinkRefused):
            await links(lending, f"puppet {number % 90}", number)

    await asyncio.gather(*map(puppet, range(2, 200)))
    assert len(peers(lease)) == 5
    assert 1 in peers(lease)
    await lending._end(lease)
    assert peers(lease) == []
    await lending.close()


async def test_nobody_takes_the_number_of_anothers_link(lending: Lending) -> None:
    lease, other = await leased(lending, before=NodeId("b")), await leased(lending, epoch=2)
    await links(lending, "b", 7)

    with pytest.raises(LinkRefused, match="another link has this number"):
        await links(lending, "c", 7, epoch=2)
    await links(lending, "b", 7)

    assert lease.neighbours == {"before": 7}
    assert other.neighbours == {}
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
