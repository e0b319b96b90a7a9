"""What a view wants done."""

from __future__ import annotations

from mesh_llm.frozen import frozen
from mesh_llm.membership.messages import Message
from mesh_llm.types import Address, NodeId


@frozen
class Send:
    """To a connected member; may be lost without harm."""

    to: NodeId
    message: Message


@frozen
class Connect:
    """Try once; nobody asks how it went, but a connection is told by `on_connected`."""

    node: NodeId
    address: Address


@frozen
class Disconnect:
    node: NodeId
    reason: str


@frozen
class Changed:
    """Members of whom planning has to take another look: standing, incarnation, facts or reach."""

    nodes: tuple[NodeId, ...]


@frozen
class Duplicate:
    """Somebody else lives under this node's id; said once."""

    reason: str


Effect = Send | Connect | Disconnect | Changed | Duplicate
