"""The memory that nodes lend, and how layers lie in it: on the GPUs first, the rest in main memory. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mesh_llm.planning.load import Load
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one node lends, and what that is a part of."""

    main_bytes: int
    machine: str
    machine_bytes: int
    """Of all nodes on its machine together."""
    gpus: tuple[tuple[str, int], ...]
    """Free bytes by device, which nodes on its machine may share, too."""
    gpu_layers: int

    @property
    def gpu_bytes(self) -> int:
        return sum(size for _, size in self.gpus)

    @property
    def total_bytes(self) -> int:
        return self.main_bytes + self.gpu_bytes


def rooms(nodes: Iterable[Candidate]) -> dict[NodeId, Room]:
    """What every node lends. Of a machine's free memory the largest figure counts: a
    node that starts beside a loaded model sees less, and it is lent already."""
    nodes = tuple(nodes)
    machines: defaultdict[str, int] = defaultdict(int)
    gpus: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in nodes:
        key = _machine(node)
        size = node.facts.machine_memory_bytes or node.facts.memory_bytes
        machines[key] = max(machines[key], size)
        for device in node.facts.gpus:
            gpus[key, device.name] = max(gpus[key, device.name], device.free_bytes)
    return {node.id: _room(node, machines, gpus) for node in nodes}


def _machine(node: Candidate) -> str:
    return node.facts.machine or f"of {node.id}"


def _room(node: Candidate, machines: Mapping[str, int], gpus: Mapping[tuple[str, str], int]) -> Room:
    key, facts = _machine(node), node.facts
    names = sorted({device.name for device in facts.gpus})
    return Room(
        main_bytes=max(0, min(facts.memory_bytes, machines[key])),
        machine=key,
        machine_bytes=machines[key],
        gpus=tuple((name, max(0, gpus[key, name])) for name in names),
        gpu_layers=1 << 30 if facts.gpu_layers is None else max(0, facts.gpu_layers),
    )


class Free(NamedTuple):
    """What is left for one node."""

    main_bytes: int
    gpu_bytes: int
    gpu_layers: int


@dataclass(slots=True)
class Ledger:
    """Memory that a plan under way has taken, so that what nodes share is given out once."""

    _machines: dict[str, int] = field(default_factory=dict)
    _gpus: dict[tuple[str, str], int] = field(default_factory=dict)

    def free(self, room: Room) -> Free:
        taken = self._machines.get(room.machine, 0)
        gpus = 0
        for name, size in room.gpus:
            gpus += max(0, size - self._gpus.get((room.machine, name), 0))
        main = max(0, min(room.main_bytes, room.machine_bytes - taken))
        return Free(main_bytes=main, gpu_bytes=gpus, gpu_layers=room.gpu_layers)

    def take(self, room: Room, main_bytes: int, gpu_bytes: int) -> None:
        self._machines[room.machine] = self._machines.get(room.machine, 0) + main_bytes
        for name, size in room.gpus:
            key = (room.machine, name)
            here = min(gpu_bytes, max(0, size - self._gpus.get(key, 0)))
            self._gpus[key] = self._gpus.get(key, 0) + here
            gpu_bytes -= here


def total_bytes(given: Iterable[Room]) -> int:
    """All that these lend together; what they share counts once."""
    ledger, total = Ledger(), 0
    # The smallest first: a large one then takes what they have left of their machine.
    for room in sorted(given, key=lambda room: room.total_bytes):
        free = ledger.free(room)
        ledger.take(room, free.main_bytes, free.gpu_bytes)
        total += free.main_bytes + free.gpu_bytes
    return total


def dealt(given: Mapping[NodeId, Room]) -> Mapping[NodeId, Room]:
    """The same rooms with GPUs that several use dealt out in equal parts: else the first took all."""
    users = Counter((room.machine, name) for room in given.values() for name, _ in room.gpus)
    if all(count == 1 for count in users.values()):
        return given
    return {
        id: replace(room, gpus=tuple((name, size // users[room.machine, name]) for name, size in room.gpus))
        for id, room in given.items()
    }


def divided(given: Mapping[NodeId, Room]) -> Mapping[NodeId, Room]:
    """The same rooms with all that they share dealt out, so that all can be filled at once."""
    members: defaultdict[str, list[NodeId]] = defaultdict(list)
    for id, room in given.items():
        members[room.machine].append(id)
    found = dict(dealt(given))
    for ids in members.values():
        left = given[ids[0]].machine_bytes
        # The smallest first: what one cannot use is for the others.
        for rank, id in enumerate(sorted(ids, key=lambda id: (given[id].main_bytes, id))):
            main = min(given[id].main_bytes, left // (len(ids) - rank))
            left -= main
            if main != given[id].main_bytes:
                found[id] = replace(found[id], main_bytes=main)
    return found


class Lodging(NamedTuple):
    """Where one stage lies. Its last layers are the GPUs', as the engine has it."""

    on_gpu: int
    gpu_bytes: int
    main_bytes: int


def lodge(free: Free, load: Load, first: int, last: int, *, host: bool, head: bool) -> Lodging | None:
    """A place for layers [first, last), or None where they do not fit."""
    scratch = load.scratch_bytes(host=host, head=head)
    fixed = load.facts.embedding_bytes + load.facts.other_bytes if host else 0
    head_bytes = load.head_bytes if head else 0
    room = free.gpu_bytes - scratch - head_bytes
    on_gpu = 0
    if free.gpu_bytes and free.gpu_layers and room >= 0:
        start = bisect_left(load.sums, load.sums[last] - room, first, last)
        on_gpu = min(last - start, free.gpu_layers)
        if on_gpu or first == last:
            start = last - on_gpu
            rest = load.sums[start] - load.sums[first] + scratch if start > first else 0
            if fixed + rest <= free.main_bytes:
                taken = scratch + head_bytes + load.sums[last] - load.sums[start]
                return Lodging(on_gpu=on_gpu, gpu_bytes=taken, main_bytes=fixed + rest)
            return None
    # In main memory a host's head that is tied to the embedding is that embedding.
    own_head = load.facts.head_bytes if head and host else head_bytes
    main = fixed + own_head + load.sums[last] - load.sums[first] + scratch
    return Lodging(on_gpu=0, gpu_bytes=0, main_bytes=main) if main <= free.main_bytes else None


def furthest(free: Free, load: Load, first: int, *, host: bool, head: bool) -> int | None:
    """The end of the longest range of layers from `first` on that fits; None where not even none does."""
    scratch = load.scratch_bytes(host=host, head=head)
    fixed = load.facts.embedding_bytes + load.facts.other_bytes if host else 0
    head_bytes = load.head_bytes if head else 0
    gpu = free.gpu_bytes - scratch - head_bytes if free.gpu_bytes and free.gpu_layers else -1
    main = free.main_bytes - fixed - scratch
    last = first
    if gpu >= 0:
        last = _reach(load, first, gpu, free.gpu_layers)
    else:
        main -= load.facts.head_bytes if head and host else head_bytes
    if main >= 0:
        middle = _reach(load, first, main)
        last = max(last, _reach(load, middle, gpu, free.gpu_layers) if gpu >= 0 else middle)
    while last > first and lodge(free, load, first, last, host=host, head=head) is None:
        last -= 1
    return last if last > first or lodge(free, load, first, first, host=host, head=head) else None


def _reach(load: Load, first: int, size: int, at_most: int = 1 << 30) -> int:
    return min(bisect_right(load.sums, load.sums[first] + size, first) - 1, first + at_most)
