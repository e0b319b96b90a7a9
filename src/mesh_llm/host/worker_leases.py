"""The leases of a plan's workers: layers that they hold in memory while a stream to the host is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from mesh_llm.defaults import LEASE_FETCHES_S, LEASE_LOADS_S, LEASE_SILENCE_S
from mesh_llm.errors import MeshError
from mesh_llm.mesh_settings import Adapter
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import refusal
from mesh_llm.tasks import cancelled, task_group
from mesh_llm.transport.network import Stream
from mesh_llm.types import Fingerprint, NodeId, Place, Plan, Stage

_MOST_BYTES = 1 << 53
"""That a worker may claim to have: more is no number of bytes, but of digits in a sentence."""


class StageLost(MeshError):
    """A worker refused its layers, or was lost with them."""

    def __init__(self, node: NodeId, message: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(slots=True, kw_only=True)
class Headway:
    """How far a worker is with its layers: it may be slow, but has to make progress."""

    need_bytes: int
    fetch_bytes: int
    """What its node may have to fetch: the layers of its other devices come first, perhaps."""
    since_s: float
    fetches: bool = True
    """First, if at all."""
    told_bytes: int = 0
    """By its last word; each of several fetches begins anew."""
    come_bytes: int = 0
    """In all, since it fetches or loads."""
    marked_bytes: int = 0

    def within_s(self, done_bytes: int, *, fetches: bool, now: float) -> float:
        """What is left of its time for the next step."""
        if self.fetches and not fetches:
            self.fetches, self.since_s = False, now
            self.told_bytes = self.come_bytes = self.marked_bytes = 0
        all_bytes, steps = (self.fetch_bytes, 1000) if self.fetches else (self.need_bytes, 100)
        self.come_bytes += max(0, done_bytes - self.told_bytes)
        # Nobody gets more time by layers that are larger than they can be.
        self.come_bytes = min(self.come_bytes, 2 * all_bytes)
        self.told_bytes = done_bytes
        if self.come_bytes >= self.marked_bytes + max(1, all_bytes // steps):
            self.marked_bytes, self.since_s = self.come_bytes, now
        return self.since_s + (LEASE_FETCHES_S if self.fetches else LEASE_LOADS_S) - now


class WorkerLeases:
    def __init__(
        self,
        *,
        epoch: int,
        fingerprint: Fingerprint,
        adapters: Sequence[Adapter],
        mesh: Mesh,
        on_lost: Callable[[NodeId, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost`: a lease has ended while it was needed."""
        self.resident: dict[Place, int] = {}
        """Bytes of weights in the memory of each worker."""
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._adapters = adapters
        self._mesh = mesh
        self._on_lost = on_lost
        self._clock = clock
        self._loaded: dict[Place, tuple[int, int]] = {}

    async def take(self, plan: Plan, stack: AsyncExitStack, tell: Callable[[str], None]) -> None:
        """Returns when all layers are in memory; from then on each lease is watched, until `stack` ends."""
        async with task_group() as group:
            leases = [group.create_task(self._take_one(plan, stage, stack, tell)) for stage in plan.workers]
        for stage, lease in zip(plan.workers, leases, strict=True):
            watch = asyncio.create_task(self._watch(stage, lease.result()), name="lease")
            stack.push_async_callback(cancelled, watch)

    async def _take_one(
        self, plan: Plan, stage: Stage, stack: AsyncExitStack, tell: Callable[[str], None]
    ) -> Stream:
        name = self._mesh.name_of(stage.node)
        try:
            async with asyncio.timeout(LEASE_SILENCE_S):
                stream = await self._mesh.open(stage.node, "lease", self._wish(plan, stage))
            stack.push_async_callback(_finished, stream)
            own = (each.need_bytes for each in plan.workers if each.node == stage.node)
            headway = Headway(need_bytes=stage.need_bytes, fetch_bytes=sum(own), since_s=self._clock())
            while True:
                async with asyncio.timeout(LEASE_SILENCE_S):
                    answer = await stream.read_document()
                match answer:
                    case {"ready": True, "resident_bytes": int(resident)} if 0 <= resident < _MOST_BYTES:
                        self.resident[stage.place] = resident
                        return stream
                    case {"done_bytes": int(done), "total_bytes": int(total)} if (
                        0 <= done < _MOST_BYTES and 0 <= total < _MOST_BYTES
                    ):
                        fetches = answer.get("fetching") is True
                        if headway.within_s(done, fetches=fetches, now=self._clock()) < 0:
                            raise StageLost(stage.node, f"{name} makes no progress with its layers")
                        self._loaded[stage.place] = (done, total)
                        tell(self._progress(fetching=fetches))
                    case {"refused": str()}:
                        reason = refusal(answer, "it gave no reason")
                        raise StageLost(stage.node, f"{name} refused its layers: {reason}")
                    case _:
                        raise StageLost(stage.node, f"{name} sent an invalid answer")
        except TimeoutError:
            raise StageLost(stage.node, f"{name} did not answer within {LEASE_SILENCE_S:.0f} s") from None
        except StageLost:
            raise
        except MeshError as error:
            raise StageLost(stage.node, f"{name} was lost: {error.message}") from error

    def _wish(self, plan: Plan, stage: Stage) -> dict[str, Any]:
        """The layers that a worker is asked for."""
        before = plan.workers[: plan.workers.index(stage)]
        wish: dict[str, Any] = {
            "epoch": self._epoch,
            "fingerprint": self._fingerprint,
            "first": stage.first,
            "last": stage.last,
            "need_bytes": stage.need_bytes,
            "head": plan.head_on_worker and stage is plan.stages[-1],
            "device": stage.device,
            "before": before[-1].node if before else "",
        }
        if self._adapters:
            wish["adapters"] = [adapter.file.digest for adapter in self._adapters]
        return wish

    def _progress(self, *, fetching: bool) -> str:
        """Of all workers together."""
        done = sum(done for done, _ in self._loaded.values())
        total = sum(total for _, total in self._loaded.values())
        share = 100 * done // total if total else 0
        return f"workers {'fetch' if fetching else 'load'} their layers: {share} %"

    async def _watch(self, stage: Stage, lease: Stream) -> None:
        """A lease that ends is a worker that is lost."""
        reason = "the connection to it broke"
        with suppress(MeshError):
            answer = await lease.read_document()
            reason = refusal(answer, reason)
        self._on_lost(stage.node, reason)


async def _finished(stream: Stream) -> None:
    with suppress(MeshError, TimeoutError):
        async with asyncio.timeout(1.0):
            await stream.finish()
