"""What a view wants done."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.membership.messages import Message
from mesh_llm.types import Address, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """To a connected member; may be lost without harm."""

    to: NodeId
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Try once; nobody asks how it went, but a connection is told by `on_connected`."""

    node: NodeId
    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Members of whom planning has to take another look: standing, incarnation, facts or reach."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Somebody else lives under this node's id; said once."""

    reason: str


Effect = Send | Connect | Disconnect | Changed | Duplicate
