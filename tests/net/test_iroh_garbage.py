"""Streams that nobody holds any more are freed on the loop, whichever thread notices."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mesh_llm.transport.iroh_library import iroh
from tests.support.members import mesh_of_members
from tests.support.upstream import WAIT_S


@pytest.mark.parametrize("kind", ["SendStream", "RecvStream"])
async def test_garbage_that_another_thread_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    lib = iroh()._UniffiLib
    name = f"uniffi_iroh_ffi_fn_free_{kind.lower()}"
    original = getattr(lib, name)

    def free(*arguments: Any) -> Any:
        freed.append(threading.get_ident())
        return original(*arguments)

    async with mesh_of_members() as mesh:
        first, second = await mesh.pair()
        stream = await first.network.peers[second.id].open("echo", {})
        monkeypatch.setattr(lib, name, free)
        halves = [stream.sending if kind == "SendStream" else stream.receiving]
        stream.sending = stream.receiving = None
        freed.clear()

        finder = threading.Thread(target=halves.clear)
        finder.start()
        await asyncio.to_thread(finder.join)

        async with asyncio.timeout(WAIT_S):
            while not freed:
                await asyncio.sleep(0.001)
        assert set(freed) == {threading.get_ident()}
