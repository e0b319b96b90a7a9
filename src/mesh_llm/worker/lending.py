"""This machine's device, lent to the hosts of plans.

A host asks for layers on a stream of its own and keeps that stream open: it is
the lease. While it is open the host may link its engine to the worker, and
workers next to each other in the plan may link among themselves. When it ends,
the plan is over; the weights stay in memory for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mesh_llm.defaults import LEASE_SILENCE_S
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.errors import EngineFailed, LinkRefused, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.tasks import cancelled
from mesh_llm.transport.network import Stream
from mesh_llm.types import Fingerprint, NodeId, Progress

log = logging.getLogger(__name__)

_BEAT_S = LEASE_SILENCE_S / 3
"""Between two signs of life of a worker that fetches its layers: a fetch has bounds of its own."""


@frozen
class Terms:
    """What a host asks for."""

    epoch: int
    fingerprint: Fingerprint
    first: int
    last: int
    need_bytes: int
    head: bool = True
    """Whether the output head is part of it; hosts of older versions do not say."""

    def text(self, layers: int) -> str:
        return f"layers {self.first}-{self.last - 1} of {layers}, {self.need_bytes / 1e9:.1f} GB"

    @classmethod
    def read(cls, header: dict[str, Any]) -> Terms:
        match header:
            case {
                "epoch": int(epoch),
                "fingerprint": str(fingerprint),
                "first": int(first),
                "last": int(last),
                "need_bytes": int(need),
            } if 0 < epoch < 1 << 53 and 0 <= first < last <= 10_000 and 0 <= need < 1 << 53:
                return cls(
                    epoch=epoch,
                    fingerprint=Fingerprint(fingerprint),
                    first=first,
                    last=last,
                    need_bytes=need,
                    head=header.get("head") is not False,
                )
        raise LinkRefused("this is not a request for layers")


@frozen
class Weights:
    """Where the layers of a lease lie on this disk."""

    files: Sequence[Path]
    tensors: Sequence[str] | None = None
    """Those that are there, where the files have holes."""


Step = Callable[[int, int], None]
"""Told bytes, done and in all."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    host: NodeId
    terms: Terms
    neighbours: list[int] = field(default_factory=list)
    """Numbers of the links to other workers of the plan."""


class Lending:
    """The worker child and its leases."""

    def __init__(
        self,
        *,
        specify: Callable[[], WorkerSpec],
        weights: Callable[[Terms, Step], Awaitable[Weights]],
        on_change: Callable[[], None],
        tell: Callable[[Lease], None],
        progress: Callable[[Progress], None],
    ) -> None:
        self._specify = specify
        self._weights = weights
        self._on_change = on_change
        self._tell = tell
        self._progress = progress
        self.leases: list[Lease] = []
        self.closed: str | None = None
        """Why nothing is lent any more."""
        self.resident_bytes = 0
        """Weights in the worker child's memory, as it said last."""
        self.starts = 0
        self.deaths = 0
        """Of worker children that nobody told to end."""
        self._keeper: asyncio.Task[None] | None = None
        self._worker_process: asyncio.Future[WorkerProcess] | None = None

    @property
    def lent_bytes(self) -> int:
        return sum(lease.terms.need_bytes for lease in self.leases)

    @property
    def worker_pid(self) -> int | None:
        """Of the worker child, while there is one."""
        ready = self._worker_process
        if ready is None or not ready.done() or ready.cancelled() or ready.exception() is not None:
            return None
        return ready.result().child.pid

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))

    # -- the child -----------------------------------------------------------------------------

    async def _worker(self) -> WorkerProcess:
        """The running worker child, started if there is none."""
        if self._worker_process is None:
            self._worker_process = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._worker_process), name="worker child")
        return await asyncio.shield(self._worker_process)

    async def _keep(self, ready: asyncio.Future[WorkerProcess]) -> None:
        try:
            async with lend(self._specify()) as worker_process:
                self.starts += 1
                ready.set_result(worker_process)
                assert worker_process.death is not None
                reason = await asyncio.shield(worker_process.death)
            self.deaths += 1
            log.warning("worker child ended: %s", reason)
        except MeshError as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            if not ready.done():
                ready.set_exception(EngineFailed("the worker was not started"))
                ready.exception()  # looked at, whether or not somebody waits for it
            self._worker_process = None
            self.resident_bytes = 0

    # -- leases --------------------------------------------------------------------------------

    async def serve_lease(self, host: NodeId, header: dict[str, Any], stream: Stream) -> None:
        """The stream's task: as long as the lease."""
        lease: Lease | None = None
        try:
            terms = Terms.read(header)
            if self.closed is not None:
                raise LinkRefused(self.closed)
            lease = Lease(host=host, terms=terms)
            self.leases.append(lease)
            # The host says nothing more: its end of the stream is the end of the lease, also while loading.
            over = asyncio.create_task(stream.read(1), name="end of a lease")
            try:
                if (worker_process := await self._prepare_unless(over, terms, stream)) is not None:
                    self._tell(lease)
                    self._on_change()
                    await self._until_over(worker_process, over)
            finally:
                over.cancel()
                with suppress(asyncio.CancelledError, MeshError):
                    await over
        except MeshError as error:
            with suppress(MeshError):
                await stream.write_document({"refused": error.message})
                await stream.finish()
        finally:
            if lease is not None:
                await self._end(lease)

    async def _prepare(self, terms: Terms, stream: Stream) -> WorkerProcess:
        """Bring the layers to this disk and into memory; the host hears how far that is."""
        steps: asyncio.Queue[tuple[int, int]] = asyncio.Queue(maxsize=1)
        fetching = True
        loading: Progress | None = None

        def step(done: int, total: int) -> None:
            if steps.full():
                steps.get_nowait()
            steps.put_nowait((done, total))

        async def report() -> None:
            nonlocal loading
            done, total = 0, 0
            while True:
                try:
                    async with asyncio.timeout(_BEAT_S if fetching else None):
                        done, total = await steps.get()
                except TimeoutError:
                    if not fetching:
                        continue
                document: dict[str, Any] = {"done_bytes": done, "total_bytes": total}
                if not fetching:
                    loading = Progress(what="Loading layers", done=done, total=total, unit="bytes")
                    self._progress(loading)
                await stream.write_document({**document, "fetching": True} if fetching else document)

        reporting = asyncio.create_task(report(), name="progress of a lease")
        try:
            weights = await self._weights(terms, step)
            fetching = False
            worker_process = await self._worker()
            files = [str(file) for file in weights.files]
            await worker_process.add_model(terms.fingerprint, files, weights.tensors)
            resident = await worker_process.prepare(terms.fingerprint, (terms.first, terms.last), step)
        finally:
            reporting.cancel()
            await asyncio.wait((reporting,))
        # The last step may have come too late to be reported.
        if loading is not None and loading.done < loading.total:
            self._progress(replace(loading, done=loading.total))
        self.resident_bytes = resident
        await stream.write_document({"ready": True, "resident_bytes": resident})
        return worker_process

    async def _prepare_unless(
        self, over: asyncio.Task[bytes], terms: Terms, stream: Stream
    ) -> WorkerProcess | None:
        """None where the host gave the lease up before the layers were in memory."""
        preparing = asyncio.create_task(self._prepare(terms, stream), name="layers of a lease")
        try:
            await asyncio.wait((preparing, over), return_when=asyncio.FIRST_COMPLETED)
            return preparing.result() if preparing.done() else None
        finally:
            await cancelled(preparing)

    async def _until_over(self, worker_process: WorkerProcess, over: asyncio.Task[bytes]) -> None:
        """Ends with the host's end of the stream, or by raising why the worker is no more."""
        assert worker_process.death is not None
        await asyncio.wait((over, worker_process.death), return_when=asyncio.FIRST_COMPLETED)
        if worker_process.death.done() and not worker_process.death.cancelled():
            raise LinkRefused(worker_process.death.result())

    async def _end(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self._on_change()
        if (
            self._worker_process is not None
            and self._worker_process.done()
            and not self._worker_process.exception()
        ):
            for number in lease.neighbours:
                await self._worker_process.result().drop_peer(number)

    # -- links ---------------------------------------------------------------------------------

    async def receive(self, origin: NodeId, purpose: dict[str, Any], link: socket.socket) -> None:
        """Hand a link to the worker, if there is a lease for it. The worker has a copy of its own then."""
        try:
            with link:
                async with asyncio.timeout(LEASE_SILENCE_S):
                    await self._hand_over(origin, purpose, link)
        except TimeoutError:
            raise LinkRefused(f"the worker did not accept a link within {LEASE_SILENCE_S:.0f} s") from None

    async def _hand_over(self, origin: NodeId, purpose: dict[str, Any], link: socket.socket) -> None:
        match purpose:
            case {"kind": "session", "epoch": int(epoch)}:
                self.lease_of(origin, epoch)
                await (await self._worker()).serve(link)
            case {"kind": "neighbour", "host": str(host), "epoch": int(epoch), "number": int(number)}:
                await self.add_neighbour(self.lease_of(NodeId(host), epoch), number, link)
            case _:
                raise LinkRefused("this link does not exist")

    async def add_neighbour(self, lease: Lease, number: int, link: socket.socket) -> None:
        """Owns the link from here on, whatever happens."""
        with link:
            if not 0 <= number < 1 << 31 or lease not in self.leases:
                raise LinkRefused("there is no lease for this link")
            lease.neighbours.append(number)
            await (await self._worker()).add_peer(number, link)

    def lease_of(self, host: NodeId, epoch: int) -> Lease:
        for lease in self.leases:
            if lease.terms.epoch == epoch and lease.host == host:
                return lease
        raise LinkRefused("there is no lease for this link")
