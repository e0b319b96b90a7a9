"""The layers of a worker's leases, fetched where they are not here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.node.layer_supply import LayerSupply
from mesh_llm.types import Fingerprint, Progress, ProgressSink
from mesh_llm.worker.lending import Terms

OURS = Fingerprint("ours")


class Shelf:
    """Knows the model, and has none of its layers."""

    def files(self, fingerprint: Fingerprint) -> None:
        return None

    def changed(self, fingerprint: Fingerprint) -> None:
        return None

    def part(self, fingerprint: Fingerprint) -> Any:
        return SimpleNamespace(has=lambda share: False)

    def keep_part(self, held: object) -> None: ...


def layer_supply(config: NodeConfig) -> LayerSupply:
    unused: Any = None
    shelf: Any = Shelf()
    offers: Any = SimpleNamespace(side_files=SimpleNamespace(paths_of=lambda digests: {}), tell=lambda: None)
    return LayerSupply(
        config=config,
        settings=lambda: None,
        model_files=shelf,
        offers=offers,
        mesh=unused,
        sources=unused,
        check=unused,
        tell=unused,
        doing=unused,
        progress=lambda made: None,
    )


async def test_a_lease_that_waits_for_another_devices_layers_tells_how_far_these_are(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host would else give it up as one that does nothing."""
    supply, has_come = layer_supply(NodeConfig(home=tmp_path)), asyncio.Event()

    async def fetch(wish: object, share: object, progress: ProgressSink) -> Any:
        while not has_come.is_set():
            progress(Progress(what="Fetching", done=1, total=10, unit="bytes"))
            await asyncio.sleep(0.001)
        return SimpleNamespace(paths=(), tensors=())

    monkeypatch.setattr(supply, "_fetch_layers", fetch)
    told: dict[str, list[tuple[int, int]]] = {"first": [], "second": []}

    def lease(name: str) -> asyncio.Task[Any]:
        terms = Terms(epoch=1, fingerprint=OURS, first=0, last=1, need_bytes=1, device=name)
        return asyncio.create_task(
            supply.weights(terms, lambda done, total: told[name].append((done, total)))
        )

    leases = [lease("first"), lease("second")]
    try:
        async with asyncio.timeout(30):
            while not told["second"]:
                await asyncio.sleep(0.001)
    finally:
        has_come.set()
        await asyncio.wait(leases, timeout=30)

    assert told["second"][0] == (1, 10)
