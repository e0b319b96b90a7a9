"""What a worker tells while it brings layers into memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

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
