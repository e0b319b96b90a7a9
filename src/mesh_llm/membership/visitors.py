"""Lite clients: they are told what members know, and believed nothing but their own name and state."""

from __future__ import annotations

from mesh_llm.membership.effects import Disconnect
from mesh_llm.membership.gossip import Gossip
from mesh_llm.membership.heartbeat import Heartbeat
from mesh_llm.membership.links import Links
from mesh_llm.membership.messages import Ack, Compare, GuestMessage, Message, Ping, Want
from mesh_llm.membership.view_state import ViewState, Visitor
from mesh_llm.types import Demand, NodeFacts, NodeId, Role

MEMBER_VISITOR_S = 30.0
"""Of silence after which a lite client's connection is closed; a closed lid may open again."""


class Visitors:
    """Clients that are connected here, and what a client says of itself."""

    def __init__(self, state: ViewState, links: Links, gossip: Gossip) -> None:
        self._state = state
        self._links = links
        self._gossip = gossip

    def connected(self, node: NodeId) -> None:
        state = self._state
        facts = NodeFacts(name="", role=Role.CLIENT, version="")
        visitor = state.visitors[node] = Visitor(link=Heartbeat(node, state.now), facts=facts)
        state.touched.add(node)
        self._links.begin(visitor.link)

    def disconnected(self, node: NodeId) -> None:
        if self._state.visitors.pop(node, None) is not None:
            self._state.touched.add(node)

    def receive(self, visitor: Visitor, message: Message) -> None:
        """Answer a client. What it may say is its name and how it is."""
        link = visitor.link
        link.heard_at = self._state.now
        match message:
            case Ping():
                self._links.ack(link, message, ask=False)
            case Ack():
                self._links.on_ack(link, message)
            case Compare():
                self._gossip.compare(link, message)
            case Want():
                self._gossip.want(link, message)
            case GuestMessage(name=name, version=version, state=state, reason=reason):
                visitor.facts = NodeFacts(
                    name=name,
                    role=Role.CLIENT,
                    version=version,
                    state=state,
                    reason=reason,
                    demand=tuple(Demand(fingerprint=each, wanted=True) for each in message.wanted),
                )
                self._state.touched.add(link.node)

    def look(self) -> None:
        """Ping them, and let go of those that are silent."""
        state = self._state
        for node, visitor in list(state.visitors.items()):
            if visitor.link.ping_due(state.now):
                self._links.ping(visitor.link)
            if visitor.link.silence(state.now) >= MEMBER_VISITOR_S:
                self.disconnected(node)
                state.outbox.add(Disconnect(node=node, reason="it is silent"))

    def introduce(self, node: NodeId) -> None:
        """This node is a client itself: its name and state, for a member that it is connected to."""
        facts = self._state.own.record.facts
        message = GuestMessage(
            name=facts.name,
            version=facts.version,
            state=facts.state,
            reason=facts.reason,
            wanted=tuple(each.fingerprint for each in facts.demand if each.wanted),
        )
        self._state.outbox.send(node, message)
