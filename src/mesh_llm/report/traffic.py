"""What crosses to a peer: its connection, and the data links that take another way.

Links on one machine, plain ones, and those that a third node passes on are no part of
the connection. What crosses them is counted by the engine, so that every node has it
from the host of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mesh_llm.types import LinkKind, NodeId

if TYPE_CHECKING:
    from mesh_llm.node.node import Node

_APART = (LinkKind.LOCAL, LinkKind.TCP)


def traffic(
    node: Node, peer: NodeId, host: str | None, stages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`link` of a member in the status; `host` and `stages` (of `engine`): as the host tells of them."""
    ways = node.mesh.paths
    own = ways.traffic(peer)
    found = crossing(host, stages, node.identity.id, peer)
    if found is None:
        return own
    kind, counted = found
    if (kind or ways.of_links(peer)) not in _APART and not ways.between(peer):
        return own  # as a part of the connection
    summed = {name: own[name] + counted[name] for name in ("sent_bytes", "received_bytes", "bytes_per_s")}
    # Neither was at its best while the other was, as a rule.
    return {**own, **summed, "peak_bytes_per_s": max(own["peak_bytes_per_s"], counted["peak_bytes_per_s"])}


def crossing(
    host: str | None, stages: Sequence[Mapping[str, Any]], here: str, there: str
) -> tuple[str | None, dict[str, Any]] | None:
    """The data link of a plan between two nodes, as the first of them sees it: its kind, where that is
    told, and its bytes. None where there is none."""
    workers = {stage["node"]: stage for stage in stages}
    if here == host and there in workers:
        return workers[there]["link"], dict(workers[there]["traffic"])
    if there == host and here in workers:
        return workers[here]["link"], _turned(workers[here]["traffic"])
    for one, following in pairwise(stages):
        if one["pushes"] and (one["node"], following["node"]) == (here, there):
            return None, dict(one["pushed"])
        if one["pushes"] and (one["node"], following["node"]) == (there, here):
            return None, _turned(one["pushed"])
    return None


def _turned(bytes_: Mapping[str, Any]) -> dict[str, Any]:
    return {**bytes_, "sent_bytes": bytes_["received_bytes"], "received_bytes": bytes_["sent_bytes"]}
