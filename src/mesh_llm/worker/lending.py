"""This machine's devices, lent to the hosts of plans: each has a worker child of its own.

A host asks for layers on a stream of its own and keeps that stream open: it is
the lease. While it is open the host may link its engine to the worker, and
workers next to each other in the plan may link among themselves. When it ends,
the plan is over; the weights stay in memory for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_llm.defaults import LEASE_SILENCE_S
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.errors import EngineFailed, LinkRefused, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ADAPTERS_LIMIT
from mesh_llm.tasks import cancelled
from mesh_llm.transport.network import Stream
from mesh_llm.types import Fingerprint, NodeId, Progress
from mesh_llm.worker.lease_progress import LeaseProgress

log = logging.getLogger(__name__)

_LINKS_FROM_OTHERS = 4
"""To a lease whose host does not say who may link to it: one would do, but anybody may come first."""
_NEXT, _BEFORE = "next", "before"


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
    device: str = ""
    """Where they are to lie; without a name, on the first that is lent."""
    adapters: tuple[str, ...] = ()
    """Digests of the LoRA adapters that go with the model."""
    before: NodeId | None = None
    """The worker with the layers before these, or an empty text; hosts of older versions do not say."""

    def text(self, layers: int) -> str:
        where = f" on {self.device}" if self.device else ""
        return f"layers {self.first}-{self.last - 1} of {layers}{where}, {self.need_bytes / 1e9:.1f} GB"

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
                    device=device_of(header),
                    adapters=_adapters_of(header),
                    before=_before_of(header),
                )
        raise LinkRefused("this is not a request for layers")


def _adapters_of(header: dict[str, Any]) -> tuple[str, ...]:
    named = header.get("adapters", [])
    if not isinstance(named, list) or len(named) > ADAPTERS_LIMIT:
        raise LinkRefused("these are not adapters")
    return tuple(map(str, named))


def _before_of(header: dict[str, Any]) -> NodeId | None:
    before = header.get("before")
    if not isinstance(before, str | None):
        raise LinkRefused("this is not a node's id")
    return None if before is None else NodeId(before)


def device_of(header: dict[str, Any], name: str = "device") -> str:
    """The device that is meant; hosts of older versions name none."""
    device = header.get(name, "")
    if not isinstance(device, str):
        raise LinkRefused("this is not a device")
    return device


@frozen
class Weights:
    """Where the layers of a lease lie on this disk."""

    files: Sequence[Path]
    tensors: Sequence[str] | None = None
    """Those that are there, where the files have holes."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Files of LoRA adapters, by digest."""
    changed: Callable[[], str | None] = lambda: None
    """What has become of the files since they were checked; None where they are as they were."""


Step = Callable[[int, int], None]
"""Told bytes, done and in all."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    host: NodeId
    terms: Terms
    worker: WorkerProcess | None = None
    """From when its layers are in memory."""
    neighbours: dict[str, int] = field(default_factory=dict)
    """Numbers of the links to other workers of the plan: `next`, `before`, or the node that it came from."""
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A worker child that starts, or runs."""

    ready: asyncio.Future[WorkerProcess]
    keeper: asyncio.Task[None] | None = None
    resident_bytes: int = 0
    """Weights in its memory, as it said last."""
    models: set[str] = field(default_factory=set)
    """Fingerprints and digests of what it was told of."""
    is_old: bool = False
    """Whether it ends with the leases that it has."""


class Lending:
    """The worker children and their leases."""

    def __init__(
        self,
        *,
        specify: Callable[[str], WorkerSpec],
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
        self.starts = 0
        self.deaths = 0
        """Of worker children that nobody told to end."""
        self._children: dict[str, _Child] = {}
        """By their sockets: each device has one."""

    @property
    def lent_bytes(self) -> int:
        return sum(lease.terms.need_bytes for lease in self.leases)

    @property
    def resident_bytes(self) -> int:
        """Weights in the memory of worker children."""
        return sum(child.resident_bytes for child in self._children.values())

    @property
    def worker_pids(self) -> list[int]:
        """Of the worker children that run."""
        found = [child.ready for child in self._children.values()]
        running = [each for each in found if each.done() and not each.cancelled() and not each.exception()]
        return [each.result().child.pid for each in running]

    async def close(self) -> None:
        keepers = [child.keeper for child in self._children.values() if child.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)

    # -- the children --------------------------------------------------------------------------

    async def _worker(self, device: str) -> WorkerProcess:
        """The running worker child of a device, started if there is none."""
        spec = self._specify(device)
        if spec.socket not in self._children:
            child = _Child(ready=asyncio.get_running_loop().create_future())
            self._children[spec.socket] = child
            child.keeper = asyncio.create_task(self._keep(spec, child.ready), name="worker child")
        return await asyncio.shield(self._children[spec.socket].ready)

    def renew(self) -> None:
        """Children that are started now load other libraries, and have other sockets: old ones get no
        new leases."""
        for child in self._children.values():
            child.is_old = True
        self._end_unused()

    def spoil(self, fingerprint: Fingerprint, reason: str) -> None:
        """The bytes of a model's files are others now: end the children that may have mapped them."""
        for child in self._children.values():
            ready = child.ready
            if (
                fingerprint in child.models
                and ready.done()
                and not ready.cancelled()
                and not ready.exception()
            ):
                ready.result().end(reason)

    def _end_unused(self) -> None:
        if any(lease.worker is None for lease in self.leases):
            return  # one of them may be about to get it
        used = {lease.worker.socket for lease in self.leases if lease.worker is not None}
        for socket_path, child in self._children.items():
            if child.is_old and socket_path not in used and child.keeper is not None:
                child.keeper.cancel()

    async def _keep(self, spec: WorkerSpec, ready: asyncio.Future[WorkerProcess]) -> None:
        try:
            async with lend(spec) as worker_process:
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
            del self._children[spec.socket]

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
                if (worker_process := await self._prepare_unless(over, lease, stream)) is not None:
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

    async def _prepare(self, lease: Lease, stream: Stream) -> WorkerProcess:
        """Bring the layers to this disk and into memory; the host hears how far that is."""
        terms, progress = lease.terms, LeaseProgress(stream, self._progress)
        reporting = asyncio.create_task(progress.report(), name="progress of a lease")
        try:
            weights = await self._weights(terms, progress.step)
            progress.load()
            worker_process = await self._worker(terms.device)
            files = [str(file) for file in weights.files]
            await worker_process.add_model(terms.fingerprint, files, weights.tensors)
            for digest, path in weights.adapters.items():
                await worker_process.add_model(digest, [str(path)])
            if (child := self._children.get(worker_process.socket)) is not None:
                child.models |= {terms.fingerprint, *weights.adapters}
            layers = terms.first, terms.last
            resident = await worker_process.prepare(terms.fingerprint, layers, progress.step)
            if (changed := weights.changed()) is not None:
                # What it has in memory may be neither the file before nor the one after.
                worker_process.end(changed)
                raise LinkRefused(changed)
        finally:
            await cancelled(reporting)
        progress.finish()
        if (child := self._children.get(worker_process.socket)) is not None:
            child.resident_bytes = resident
        # Links may come as soon as the host hears of it.
        lease.worker = worker_process
        await stream.write_document({"ready": True, "resident_bytes": resident})
        return worker_process

    async def _prepare_unless(
        self, over: asyncio.Task[bytes], lease: Lease, stream: Stream
    ) -> WorkerProcess | None:
        """None where the host gave the lease up before the layers were in memory."""
        preparing = asyncio.create_task(self._prepare(lease, stream), name="layers of a lease")
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
        if lease.worker is not None:
            async with lease.linking:
                for number in lease.neighbours.values():
                    await lease.worker.drop_peer(number)
        self._end_unused()

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
                await _worker_of(self.lease_of(origin, epoch, device_of(purpose))).serve(link)
            case {"kind": "neighbour", "host": str(host), "epoch": int(epoch), "number": int(number)}:
                lease = self.lease_of(NodeId(host), epoch, device_of(purpose))
                await self._add_neighbour(lease, _seat_of(lease, origin), number, link)
            case _:
                raise LinkRefused("this link does not exist")

    async def add_next(self, lease: Lease, number: int, link: socket.socket) -> None:
        """Owns the link to the next worker from here on, whatever happens."""
        with link:
            await self._add_neighbour(lease, _NEXT, number, link)

    async def _add_neighbour(self, lease: Lease, seat: str, number: int, link: socket.socket) -> None:
        """In place of the one that had the seat before."""
        async with lease.linking:
            worker_process = _worker_of(lease)
            if not 0 <= number < 1 << 31 or lease not in self.leases:
                raise LinkRefused("there is no lease for this link")
            others = lease.neighbours.keys() - {_NEXT, _BEFORE, seat}
            if seat not in (_NEXT, _BEFORE) and len(others) >= _LINKS_FROM_OTHERS:
                raise LinkRefused("this lease has as many links as it may")
            if self._is_taken(number, lease, seat):
                # The worker would drop the link that has it.
                raise LinkRefused("another link has this number")
            old = lease.neighbours.get(seat)
            lease.neighbours[seat] = number
            if old is not None and old != number:
                await worker_process.drop_peer(old)
            await worker_process.add_peer(number, link)

    def _is_taken(self, number: int, lease: Lease, seat: str) -> bool:
        """Whether a link to the same worker child has the number, but for the one in that seat."""
        return any(
            number == taken and (each, place) != (lease, seat)
            for each in self.leases
            if each.worker is lease.worker
            for place, taken in each.neighbours.items()
        )

    async def join(self, one: Lease, following: Lease, number: int) -> None:
        """Link two devices of this node."""
        if one is following:
            raise LinkRefused("a device has no link to itself")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            await self._add_neighbour(following, _BEFORE, number, theirs)
            await self._add_neighbour(one, _NEXT, number, ours)

    def lease_of(self, host: NodeId, epoch: int, device: str) -> Lease:
        for lease in self.leases:
            if (lease.host, lease.terms.epoch, lease.terms.device) == (host, epoch, device):
                return lease
        raise LinkRefused("there is no lease for this link")


def _seat_of(lease: Lease, origin: NodeId) -> str:
    """Of a link that another node's worker opens."""
    if lease.terms.before is None:
        return origin
    if origin != lease.terms.before:
        raise LinkRefused("only the worker with the layers before these may link to it")
    return _BEFORE


def _worker_of(lease: Lease) -> WorkerProcess:
    if lease.worker is None:
        raise LinkRefused("the layers of this lease are not in memory yet")
    return lease.worker
