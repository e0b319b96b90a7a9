"""What crosses to a peer: its connection, and the data links that take another way.

Links on one machine, plain ones, and those that a third node passes on are no part of
the connection. What crosses them is counted by the engine, so that every node has it
from the host of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import EngineStageStatus, Traffic
from mesh_llm.types import LinkKind, NodeId

_APART = (LinkKind.LOCAL, LinkKind.TCP)


def traffic(view: NodeView, peer: NodeId, host: str | None, stages: Sequence[EngineStageStatus]) -> Traffic:
    """With a member; `host` and `stages` (of `engine`): as the host tells of them."""
    paths = view.mesh.paths
    own = paths.traffic(peer)
    found = crossing(host, stages, view.id, peer)
    if found is None:
        return own
    kind, counted = found
    if (kind or paths.of_links(peer)) not in _APART and not paths.between(peer):
        return own  # as a part of the connection
    return Traffic(
        sent_bytes=own.sent_bytes + counted.sent_bytes,
        received_bytes=own.received_bytes + counted.received_bytes,
        bytes_per_s=own.bytes_per_s + counted.bytes_per_s,
        # Neither was at its best while the other was, as a rule.
        peak_bytes_per_s=max(own.peak_bytes_per_s, counted.peak_bytes_per_s),
    )


def crossing(
    host: str | None, stages: Sequence[EngineStageStatus], here: str, there: str
) -> tuple[str | None, Traffic] | None:
    """The data link of a plan between two nodes, as the first of them sees it: its kind, where that is
    told, and its bytes. None where there is none."""
    if host in (here, there):
        own = [stage for stage in stages if stage.node == (there if here == host else here)]
        if own:
            seen = _sum([stage.traffic for stage in own])
            return own[0].link, seen if here == host else _turned(seen)
    for one, following in pairwise(stages):
        if one.pushes and (one.node, following.node) == (here, there):
            return None, one.pushed
        if one.pushes and (one.node, following.node) == (there, here):
            return None, _turned(one.pushed)
    return None


def _sum(seen: Sequence[Traffic]) -> Traffic:
    """Of all devices of a node."""
    return Traffic(
        sent_bytes=sum(each.sent_bytes for each in seen),
        received_bytes=sum(each.received_bytes for each in seen),
        bytes_per_s=sum(each.bytes_per_s for each in seen),
        peak_bytes_per_s=max(each.peak_bytes_per_s for each in seen),
    )


def _turned(seen: Traffic) -> Traffic:
    return replace(seen, sent_bytes=seen.received_bytes, received_bytes=seen.sent_bytes)
