"""Connections to members and clients: pings, whom this node hears on them, which of them are wanted."""

from __future__ import annotations

from mesh_llm.membership.effects import Connect, Disconnect
from mesh_llm.membership.heartbeat import Heartbeat, digest_of
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import NODES_LIMIT, Ack, Hears, Ping
from mesh_llm.membership.view_state import ViewState
from mesh_llm.types import Address, NodeId

MEMBER_SURPLUS_S = 30.0
"""That a connection wanted by neither side is kept, as a changing ring may want it back."""
MEMBER_DIALS_PER_TICK = 4
"""Sixteen a second: a remembered mesh is tried quickly, and without a storm."""

_NOWHERE = Address()


class Links:
    def __init__(self, state: ViewState) -> None:
        self._state = state
        self._pings = 0
        self._hears: frozenset[NodeId] = frozenset()
        self._hears_digest = digest_of(())

    def begin(self, link: Heartbeat) -> None:
        """On a new connection: whom this node hears, and the first ping."""
        self.tell_hears(link)
        self.ping(link)

    # -- pings ----------------------------------------------------------------------------------

    def ping(self, link: Heartbeat) -> None:
        state = self._state
        self._pings += 1
        link.pinged(self._pings, state.now)
        ping = Ping(
            number=self._pings,
            incarnation=state.own.record.incarnation,
            digest=state.records_table.digest,
            hears=self._hears_digest,
            keep=link.node in state.wanted,
        )
        state.outbox.send(link.node, ping)

    def ack(self, link: Heartbeat, ping: Ping, *, ask: bool) -> None:
        state = self._state
        ack = Ack(
            number=ping.number,
            incarnation=state.own.record.incarnation,
            digest=state.records_table.digest,
            ask=ask,
        )
        state.outbox.send(link.node, ack)

    def on_ping(self, link: Heartbeat, ping: Ping) -> None:
        """A member's."""
        link.kept = ping.keep
        self.ack(link, ping, ask=ping.hears != link.hears_digest)

    def on_ack(self, link: Heartbeat, ack: Ack) -> None:
        link.answered(ack.number, self._state.now)
        if ack.ask:
            self.tell_hears(link)

    # -- whom it hears --------------------------------------------------------------------------

    def tell_hears(self, link: Heartbeat) -> None:
        self._state.outbox.send(link.node, self._hears_message())

    def notice_hears(self) -> None:
        """Everybody connected is told where that is different now."""
        state = self._state
        hears = frozenset(node for node in state.links if state.heard(node))
        if hears != self._hears:
            self._hears, self._hears_digest = hears, digest_of(sorted(hears)[:NODES_LIMIT])
            message = self._hears_message()
            for node in state.listeners:
                state.outbox.send(node, message)

    def _hears_message(self) -> Hears:
        return Hears(nodes=tuple(sorted(self._hears))[:NODES_LIMIT])

    # -- which are wanted -----------------------------------------------------------------------

    def look(self) -> None:
        for link in list(self._state.links.values()):
            if link.ping_due(self._state.now):
                self.ping(link)
            self._release(link)

    def choose(self) -> None:
        """Whom to be connected to, where somebody appeared or went."""
        state = self._state
        if state.restless:
            state.restless = False
            for node in state.choose():
                if node not in state.links:
                    state.dialling.begin(node, state.now)

    def _release(self, link: Heartbeat) -> None:
        """A connection that neither side wants is closed after a while; both know, and nobody is doubted."""
        state = self._state
        if link.kept or link.node in state.wanted or state.living(link.node) is None:
            link.surplus_since = None
        elif link.surplus_since is None:
            link.surplus_since = state.now
        elif state.now - link.surplus_since >= MEMBER_SURPLUS_S:
            del state.links[link.node]
            state.touched |= {link.node} | link.hears
            state.outbox.add(Disconnect(node=link.node, reason="neither side needs it"))

    def dial(self) -> None:
        state = self._state
        for _ in range(MEMBER_DIALS_PER_TICK):
            node = state.dialling.due(state.now)
            if node is None:
                return
            record = state.records_table.get(node)
            kept = state.remembered.get(node)
            if record is None and kept is not None:
                record = kept.record
            left = record is not None and record.standing is Standing.LEFT and not state.observes
            useless = record is None or left or node in state.links
            far = state.living(node) is not None and node not in state.wanted
            if useless or far or record is None:
                state.dialling.end(node)
            elif record.facts.address != _NOWHERE:
                state.outbox.add(Connect(node=node, address=record.facts.address))
