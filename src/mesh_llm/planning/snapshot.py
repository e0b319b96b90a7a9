"""What one node knows of its mesh at one moment: the only thing that decisions look at. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import field

from mesh_llm.defaults import HOP_LOCAL_S
from mesh_llm.frozen import frozen
from mesh_llm.types import LinkFacts, LinkKind, NodeFacts, NodeId


@frozen
class Candidate:
    """A member of the mesh."""

    id: NodeId
    facts: NodeFacts
    alive: bool = True
    reachable: bool = True
    """This node, or one that forwards for it, can talk to it."""


@frozen
class Snapshot:
    """All members, in the order of their ids, whatever order they came in."""

    nodes: tuple[Candidate, ...]
    _by_id: dict[NodeId, Candidate] = field(init=False, repr=False, compare=False)
    _links: dict[tuple[NodeId, NodeId], LinkFacts] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(sorted(self.nodes, key=lambda node: node.id))
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "_by_id", {node.id: node for node in nodes})
        object.__setattr__(self, "_links", dict(_links(nodes)))

    def node(self, id: NodeId) -> Candidate | None:
        return self._by_id.get(id)

    def link(self, a: NodeId, b: NodeId) -> LinkFacts | None:
        """What both sides have measured of the way between them; where they differ, the worse."""
        one, other = self._links.get((a, b)), self._links.get((b, a))
        if one and other:
            return _worse(one, other)
        return one or other or self._same_machine(a, b)

    def _same_machine(self, a: NodeId, b: NodeId) -> LinkFacts | None:
        one, other = self._by_id.get(a), self._by_id.get(b)
        if not one or not other or not one.facts.machine or one.facts.machine != other.facts.machine:
            return None
        return LinkFacts(kind=LinkKind.LOCAL, rtt_s=HOP_LOCAL_S)


def _links(nodes: Iterable[Candidate]) -> Iterator[tuple[tuple[NodeId, NodeId], LinkFacts]]:
    for node in nodes:
        for other, link in node.facts.links:
            # Anybody may claim anything: what is no delay is not taken for one.
            if math.isfinite(link.rtt_s) and link.rtt_s >= 0:
                yield (node.id, other), link


def _worse(one: LinkFacts, other: LinkFacts) -> LinkFacts:
    return max(one, other, key=lambda link: (link.rtt_s, link.kind))


def listing(host: NodeId | None, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The order in which `status` shows nodes and --tensor-split counts them: host first, then by id."""
    return tuple(sorted(set(nodes), key=lambda node: (node != host, node)))
