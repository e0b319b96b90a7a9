"""Who hosts. Pure: every node that knows the same elects the same, without a vote."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from mesh_llm.planning.memory_layout import NodeMemory
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import HostingMode, NodeId


def split_hosts(
    hosts: Iterable[Candidate], rooms: Mapping[NodeId, NodeMemory], lacking: Container[NodeId] = ()
) -> tuple[Candidate, ...]:
    """For a split, the best first: who wants to, then the most GPU memory, the most memory, the least id.

    Those `lacking` a file that goes with the model come after those who have it.
    """
    return tuple(
        sorted(
            (node for node in hosts if node.facts.splits),
            key=lambda node: (*rank(node, lacking), *_size(rooms[node.id]), node.id),
        )
    )


def solo_hosts(
    hosts: Iterable[Candidate],
    rooms: Mapping[NodeId, NodeMemory],
    token_s: Mapping[NodeId, float | None],
    lacking: Container[NodeId] = (),
) -> tuple[Candidate, ...]:
    """For a model that fits on each of them, the best first: who wants to, then the fastest, then as above.

    Where a speed has not been measured yet none counts: memory and id decide.
    """
    hosts = tuple(hosts)
    seconds = {node.id: token_s.get(node.id) for node in hosts}
    known = all(value is not None for value in seconds.values())
    return tuple(
        sorted(
            hosts,
            key=lambda node: (
                *rank(node, lacking),
                (known and seconds[node.id]) or 0.0,
                *_size(rooms[node.id]),
                node.id,
            ),
        )
    )


def rank(node: Candidate, lacking: Container[NodeId] = ()) -> tuple[bool, bool]:
    """What comes before speed and memory, the lower the better: what its owner wants, and what it has."""
    return node.facts.hosting is not HostingMode.PREFER, node.id in lacking


def _size(room: NodeMemory) -> tuple[int, int]:
    return -room.gpu_bytes, -room.total_bytes
