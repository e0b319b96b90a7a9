"""The memory that nodes have for a plan, and how layers lie in it: on the GPUs first, the rest in main
memory. A host has all that it may use, a worker what it lends. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from mesh_llm.frozen import frozen
from mesh_llm.planning.layer_costs import LayerCosts
from mesh_llm.planning.memory_budget import CPU, Means, lent_devices, most_bytes, used_gpus
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import LentDevice, NodeId, Place

_ALL = 1 << 62
"""Of bytes or layers: no bound."""

K = TypeVar("K", NodeId, Place)


class OnGpu(NamedTuple):
    """What one node has of a device."""

    name: str
    own_bytes: int
    machine_bytes: int
    """Of all nodes that use it together."""
    mps: bool = False
    """Whether several processes compute on it at the same time, or take turns."""


@frozen
class NodeMemory:
    """What one node has for its part, and what that is a part of."""

    main_bytes: int
    machine: str
    machine_bytes: int
    """Of all nodes on its machine together."""
    gpus: tuple[OnGpu, ...]
    gpu_layers: int
    most_bytes: int = _ALL
    """Of main memory and GPUs together."""
    cpu_moe: int = 0
    """Experts of the first so many layers on the GPUs lie in main memory."""
    gpu_only: bool = False
    """Main memory is for experts alone."""

    @property
    def gpu_bytes(self) -> int:
        return min(self.most_bytes, sum(gpu.own_bytes for gpu in self.gpus)) if self.gpus else 0

    @property
    def total_bytes(self) -> int:
        return min(self.most_bytes, self.main_bytes + self.gpu_bytes)


class Rooms(NamedTuple):
    """What every node has for a plan, by its part in it."""

    hosting: Mapping[NodeId, NodeMemory]
    """Of all its devices."""
    lent: Mapping[Place, NodeMemory]
    """Of each device that it lends; without a name, of the first."""


def rooms(
    nodes: Iterable[Candidate], places: Mapping[NodeId, Mapping[Place, LentDevice]] | None = None
) -> Rooms:
    """Of a machine's free memory the largest figure counts: a node that
    starts beside a loaded model sees less, and it is lent already.

    `places` are those that each lends, where they have been looked up.
    """
    nodes = tuple(nodes)
    places = {node.id: places_of(node) for node in nodes} if places is None else places
    machines: defaultdict[str, int] = defaultdict(int)
    gpus: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in nodes:
        key = _machine(node)
        size = node.facts.machine_memory_bytes or node.facts.memory_bytes
        machines[key] = max(machines[key], size)
        for device in node.facts.gpus:
            gpus[key, device.name] = max(gpus[key, device.name], device.free_bytes)
    hosting = {node.id: _hosting(node, machines, gpus) for node in nodes}
    lent = {
        place: _lent(device, hosting[node.id]) for node in nodes for place, device in places[node.id].items()
    }
    return Rooms(hosting=hosting, lent=lent)


def places_of(node: Candidate) -> dict[Place, LentDevice]:
    """The devices that a node lends: the first without a name, and if there are more, all by name."""
    devices = lent_devices(node.facts)
    named = devices if len(devices) > 1 else ()
    return {Place(node.id): devices[0], **{Place(node.id, each.name): each for each in named}}


def _machine(node: Candidate) -> str:
    return node.facts.machine or f"of {node.id}"


def _hosting(node: Candidate, machines: Mapping[str, int], gpus: Mapping[tuple[str, str], int]) -> NodeMemory:
    key, facts = _machine(node), node.facts
    own = {device.name: device for device in used_gpus(facts)}
    return NodeMemory(
        main_bytes=max(0, min(facts.memory_bytes, machines[key])),
        machine=key,
        machine_bytes=machines[key],
        gpus=tuple(
            OnGpu(name, max(0, own[name].free_bytes), gpus[key, name], own[name].mps) for name in sorted(own)
        ),
        gpu_layers=_or_all(facts.gpu_layers),
        most_bytes=_or_all(most_bytes(facts)),
        cpu_moe=facts.cpu_moe,
    )


def _lent(lent: LentDevice, room: NodeMemory) -> NodeMemory:
    if lent.name == CPU:
        if not room.gpus and lent.bytes >= room.main_bytes:
            return room
        return replace(room, main_bytes=min(room.main_bytes, lent.bytes), gpus=())
    # All of it on that GPU: what does not fit there is not for this device.
    gpus = tuple(gpu._replace(own_bytes=lent.bytes) for gpu in room.gpus if gpu.name == lent.name)
    main = min(room.main_bytes, lent.experts_bytes)
    return replace(room, main_bytes=main, gpus=gpus, gpu_layers=_or_all(lent.layers), gpu_only=True)


def _or_all(bound: int | None) -> int:
    return _ALL if bound is None else max(0, bound)


def surely_holds_one(room: NodeMemory, load: LayerCosts) -> bool:
    """Whether a worker has room for the first layer, as far as a glance tells."""
    need = load.sums[1] + load.worker_scratch_bytes
    if room.cpu_moe or room.most_bytes < need:
        return False
    if room.gpus:
        return room.gpu_layers > 0 and max(gpu.own_bytes for gpu in room.gpus) >= need
    return min(room.main_bytes, room.machine_bytes) >= need


class Free(NamedTuple):
    """What is left for one node."""

    main_bytes: int
    gpu_bytes: int
    gpu_layers: int
    most_bytes: int = _ALL
    cpu_moe: int = 0
    gpu_only: bool = False


def free_of(means: Means) -> Free:
    """All that a host has while nobody shares it."""
    return Free(
        main_bytes=max(0, means.memory_bytes),
        gpu_bytes=sum(max(0, gpu.free_bytes) for gpu in used_gpus(means)),
        gpu_layers=_or_all(means.gpu_layers),
        most_bytes=_or_all(most_bytes(means)),
        cpu_moe=means.cpu_moe,
    )


@dataclass(slots=True)
class Ledger:
    """Memory that a plan under way has taken, so that what nodes share is given out once."""

    _machines: dict[str, int] = field(default_factory=dict)
    _gpus: dict[tuple[str, str], int] = field(default_factory=dict)

    def free(self, room: NodeMemory) -> Free:
        taken = self._machines.get(room.machine, 0)
        gpus = sum(self._left(room, gpu) for gpu in room.gpus) if room.gpus else 0
        main = max(0, min(room.main_bytes, room.machine_bytes - taken))
        return Free(
            main_bytes=main,
            gpu_bytes=gpus,
            gpu_layers=room.gpu_layers,
            most_bytes=room.most_bytes,
            cpu_moe=room.cpu_moe,
            gpu_only=room.gpu_only,
        )

    def _left(self, room: NodeMemory, gpu: OnGpu) -> int:
        taken = self._gpus.get((room.machine, gpu.name), 0)
        return max(0, min(gpu.own_bytes, gpu.machine_bytes - taken))

    def take(self, room: NodeMemory, main_bytes: int, gpu_bytes: int) -> None:
        self._machines[room.machine] = self._machines.get(room.machine, 0) + main_bytes
        for gpu in room.gpus:
            key = (room.machine, gpu.name)
            here = min(gpu_bytes, self._left(room, gpu))
            self._gpus[key] = self._gpus.get(key, 0) + here
            gpu_bytes -= here


def total_bytes(given: Iterable[NodeMemory]) -> int:
    """All that these have together; what they share counts once."""
    ledger, total = Ledger(), 0
    # The smallest first: a large one then takes what they have left of their machine.
    for room in sorted(given, key=lambda room: room.total_bytes):
        free = ledger.free(room)
        gpus = min(free.gpu_bytes, free.most_bytes)
        main = min(free.main_bytes, free.most_bytes - gpus)
        ledger.take(room, main, gpus)
        total += main + gpus
    return total


def dealt(given: Mapping[K, NodeMemory]) -> Mapping[K, NodeMemory]:
    """The same rooms with GPUs that several use dealt out in equal parts: else the first took all."""
    users = Counter((room.machine, gpu.name) for room in given.values() for gpu in room.gpus)
    if all(count == 1 for count in users.values()):
        return given

    def part(room: NodeMemory, gpu: OnGpu) -> OnGpu:
        equal = gpu.machine_bytes // users[room.machine, gpu.name]
        return gpu._replace(own_bytes=min(gpu.own_bytes, equal))

    return {id: replace(room, gpus=tuple(part(room, gpu) for gpu in room.gpus)) for id, room in given.items()}


def divided(given: Mapping[K, NodeMemory]) -> Mapping[K, NodeMemory]:
    """The same rooms with all that they share dealt out, so that all can be filled at once."""
    members: defaultdict[str, list[K]] = defaultdict(list)
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


class Allocation(NamedTuple):
    """Where one stage lies. Its last layers are the GPUs', as the engine has it."""

    on_gpu: int
    gpu_bytes: int
    main_bytes: int


def lodge(
    free: Free, load: LayerCosts, first: int, last: int, *, host: bool, head: bool
) -> Allocation | None:
    """A place for layers [first, last), or None where they do not fit."""
    scratch = load.scratch_bytes(host=host, head=head)
    scratch += load.copies_bytes(first, last, head=head) if host else 0
    fixed = load.facts.embedding_bytes + load.facts.other_bytes if host else 0
    head_bytes = load.head_bytes if head else 0
    # Of a bound on all memory the GPUs have what is not main memory's anyway.
    gpu_bytes = min(free.gpu_bytes, free.most_bytes - fixed)
    room = gpu_bytes - scratch - head_bytes
    on_gpu = 0
    if gpu_bytes > 0 and free.gpu_layers and room >= 0:
        on_main = bisect_left(range(first, last), -room, key=lambda start: -_on_gpu(free, load, start, last))
        on_gpu = min(last - first - on_main, free.gpu_layers)
        if on_gpu or first == last:
            start = last - on_gpu
            rest = load.sums[start] - load.sums[first] + scratch if start > first else 0
            if rest and free.gpu_only:
                return None
            rest += _experts(free, load, start, last)
            taken = scratch + head_bytes + _on_gpu(free, load, start, last)
            if fixed + rest <= min(free.main_bytes, free.most_bytes - taken):
                return Allocation(on_gpu=on_gpu, gpu_bytes=taken, main_bytes=fixed + rest)
            return None
    if free.gpu_only:
        return None
    # In main memory a host's head that is tied to the embedding is that embedding.
    own_head = load.facts.head_bytes if head and host else head_bytes
    main = fixed + own_head + load.sums[last] - load.sums[first] + scratch
    most = min(free.main_bytes, free.most_bytes)
    return Allocation(on_gpu=0, gpu_bytes=0, main_bytes=main) if main <= most else None


def _experts(free: Free, load: LayerCosts, start: int, last: int) -> int:
    """Of layers [start, last) on GPUs: what lies in main memory."""
    return load.experts[min(last, start + free.cpu_moe)] - load.experts[start]


def _on_gpu(free: Free, load: LayerCosts, start: int, last: int) -> int:
    return load.sums[last] - load.sums[start] - _experts(free, load, start, last)


def furthest(free: Free, load: LayerCosts, first: int, *, host: bool, head: bool) -> int | None:
    """The end of the longest range of layers from `first` on that fits; None where not even none does."""
    if free.cpu_moe:
        ends = range(load.count, first - 1, -1)
        return next((end for end in ends if lodge(free, load, first, end, host=host, head=head)), None)
    scratch = load.scratch_bytes(host=host, head=head)
    fixed = load.facts.embedding_bytes + load.facts.other_bytes if host else 0
    head_bytes = load.head_bytes if head else 0
    most = free.most_bytes - fixed
    gpu = min(free.gpu_bytes, most) - scratch - head_bytes if free.gpu_bytes and free.gpu_layers else -1
    main = min(free.main_bytes - fixed, most) - scratch
    last = first
    if gpu >= 0:
        last = _reach(load, first, gpu, free.gpu_layers)
    else:
        main -= load.facts.head_bytes if head and host else head_bytes
    if main >= 0:
        middle = _reach(load, first, main)
        last = max(last, _reach(load, middle, gpu, free.gpu_layers) if gpu >= 0 else middle)
    last = max(first, min(last, _reach(load, first, most - scratch)))
    while last > first and lodge(free, load, first, last, host=host, head=head) is None:
        last -= 1
    return last if last > first or lodge(free, load, first, first, host=host, head=head) else None


def _reach(load: LayerCosts, first: int, size: int, at_most: int = 1 << 30) -> int:
    return min(bisect_right(load.sums, load.sums[first] + size, first) - 1, first + at_most)
