"""How many layers each node gets: by a person's ratios, by speed, or the fastest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from mesh_llm.frozen import frozen
from mesh_llm.planning.cuts import furthest_cut, joined_from
from mesh_llm.planning.layer_costs import LayerCosts, Span
from mesh_llm.planning.memory_layout import Ledger, NodeMemory, furthest, lodge
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.types import NodeId, Place


def apportion(total: int, ratios: Sequence[float]) -> list[int]:
    """`total` in whole parts by ratios, exactly: what rounding leaves goes to the largest remainders."""
    whole = sum(ratios)
    exact = [total * ratio / whole for ratio in ratios]
    counts = [int(part) for part in exact]
    order = sorted(range(len(ratios)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


@frozen
class Capacity:
    """Layers that a node could hold if it had only that to do."""

    gpu: int
    total: int


def capacity(room: NodeMemory, load: LayerCosts, *, host: bool, head: bool | None = None) -> Capacity | None:
    """None where a host has no room for embedding and head; a worker without any for a layer has zero.

    The head is the host's, unless told otherwise.
    """
    head = host if head is None else head
    free = Ledger().free(room)
    last = furthest(free, load, 0, host=host, head=head)
    if last is None:
        return None if host else Capacity(gpu=0, total=0)
    allocation = lodge(free, load, 0, last, host=host, head=head)
    return Capacity(gpu=allocation.on_gpu if allocation else 0, total=last)


def fastest_first(
    total: int, nodes: Sequence[Capacity], rates: Sequence[tuple[float, float]], least: Sequence[int]
) -> list[int]:
    """Counts that fill the fastest memory before any slower one; everybody has at least its `least`.

    `rates` are those of a node's GPUs and of its main memory.
    """
    counts = list(least)
    left = total - sum(counts)
    segments = [
        (-rate, index, size)
        for index, (node, both) in enumerate(zip(nodes, rates, strict=True))
        for rate, size in zip(both, (node.gpu, node.total - node.gpu), strict=True)
        if size > 0
    ]
    spent = counts.copy()  # of each node's `least`, what has not been counted against a segment yet
    for _, index, size in sorted(segments):
        own = min(spent[index], size)
        spent[index] -= own
        more = min(left, size - own)
        counts[index] += more
        left -= more
    return counts


def spread(total: int, nodes: Sequence[Capacity], rates: Sequence[tuple[float, float]]) -> list[int]:
    """Counts within what each can hold, so that all take about as long; no node has none."""
    counts = [1] * len(nodes)

    def time_with(index: int, count: int) -> float:
        fast, slow = rates[index]
        on_gpu = min(count, nodes[index].gpu)
        return on_gpu / fast + (count - on_gpu) / slow

    # The next layer goes to whoever would have the least to do with it.
    queue = [(time_with(index, 2), index) for index, node in enumerate(nodes) if node.total > 1]
    heapify(queue)
    for _ in range(total - len(nodes)):
        if not queue:
            break
        _, index = queue[0]
        counts[index] += 1
        if counts[index] < nodes[index].total:
            heapreplace(queue, (time_with(index, counts[index] + 1), index))
        else:
            heappop(queue)
    return counts


def lay_out(
    inputs: PlanInputs,
    host: NodeId,
    order: Sequence[Place],
    wanted: Sequence[int],
    *,
    head_on_worker: bool = False,
) -> tuple[Span, ...] | None:
    """Ranges in the given order with about as many layers as wanted, exactly within everybody's memory.

    Layers differ in size, and nodes share machines: what does not fit where
    it was wanted moves on, first along the order, then to whoever has room.
    """
    wanted = list(wanted)
    for _ in range(len(order) + 1):
        counts, limited, left = _walk(inputs, host, order, wanted, head_on_worker)
        if not left:
            return _spans(order, counts)
        roomy = [index for index in range(len(order)) if index not in limited]
        if not roomy:
            break
        most = max(roomy, key=lambda index: (inputs.room(order[index], host=host).total_bytes, -index))
        wanted = counts
        wanted[most] += left
    counts, _, left = _walk(inputs, host, order, [inputs.load.count] * len(order), head_on_worker)
    return None if left else _spans(order, counts)


def _walk(
    inputs: PlanInputs, host: NodeId, order: Sequence[Place], wanted: Sequence[int], head_on_worker: bool
) -> tuple[list[int], set[int], int]:
    """What each gets, who could not take more, and the layers that nobody took."""
    ledger, position, carried = Ledger(), 0, 0
    rooms = inputs.rooms_of(host, order)
    counts: list[int] = []
    limited: set[int] = set()
    if Place(host) not in order:
        _take(ledger, rooms[Place(host)], inputs.load, 0, 0, host=True, head=not head_on_worker)
    for index, place in enumerate(order):
        here = place.node == host
        # Each one behind has to get a layer: a worker without any would be no part of the plan.
        behind = len(order) - index - 1
        head = not behind if head_on_worker else here
        end = furthest(ledger.free(rooms[place]), inputs.load, position, host=here, head=head)
        most = max(0, furthest_cut(inputs.load.facts, end or position, behind) - position)
        want = wanted[index] + carried
        count = _uncut(inputs.load, position, min(want, most), most)
        if want > most:
            limited.add(index)
        carried = want - count
        _take(ledger, rooms[place], inputs.load, position, position + count, host=here, head=head)
        counts.append(count)
        position += count
    return counts, limited, inputs.load.count - position


def _uncut(load: LayerCosts, position: int, count: int, most: int) -> int:
    """About so many layers from there, with all of those that stay together or none."""
    joined = joined_from(load.facts)
    if not joined < position + count < load.count:
        return count
    return most if position + most == load.count else joined - position


def _take(
    ledger: Ledger, room: NodeMemory, load: LayerCosts, first: int, last: int, *, host: bool, head: bool
) -> None:
    allocation = lodge(ledger.free(room), load, first, last, host=host, head=head)
    if allocation and (host or last > first):
        ledger.take(room, allocation.main_bytes, allocation.gpu_bytes)


def _spans(order: Sequence[Place], counts: Sequence[int]) -> tuple[Span, ...]:
    """Of those who have layers."""
    spans, position = [], 0
    for place, count in zip(order, counts, strict=True):
        if count:
            spans.append(Span(place.node, position, position + count, place.device))
            position += count
    return tuple(spans)
