"""What `mesh-llm doctor` asks a running node: its own addresses, its relay, and the way to each member."""

from __future__ import annotations

import os
from typing import Any

from mesh_llm.membership.member import Member, Standing
from mesh_llm.report.view import NodeView


def network_document(view: NodeView) -> dict[str, Any]:
    network = view.mesh.network
    address = view.mesh.facts.address
    return {
        "pid": os.getpid(),
        "ports": list(network.ports) if network is not None else [0, 0],
        "addresses": list(address.direct),
        "relay": {
            "url": address.relay,
            "reached": network.relay_reached if network is not None else None,
            "off": view.config.no_relay,
        },
        "members": [
            _member(view, member)
            for member in view.mesh.members
            if member.id != view.id and member.standing is not Standing.LEFT
        ],
    }


def _member(view: NodeView, member: Member) -> dict[str, Any]:
    facts, paths = member.facts, view.mesh.paths
    link = paths.link_to(member.id)
    return {
        "id": member.id,
        "name": facts.name or member.id[:8],
        "role": facts.role,
        "version": facts.version,
        "engine": facts.engine,
        "standing": member.standing,
        "started_s": member.incarnation / 1000,
        "connected": member.connected,
        "via": [view.mesh.name_of(other) for other in paths.between(member.id)],
        "kind": paths.of_links(member.id),
        "rtt_ms": round(1000 * link.rtt_s, 3) if link is not None else None,
        "remote": paths.remote(member.id),
        "addresses": list(facts.address.direct),
    }
