"""Program: a node of a mesh that things are done to.

As `lab.member`, and further lines of input change its world: JSON with `cut` (ids of nodes that it cannot
reach), `delay_s` (of its links) or `clock_s` (what its clock is ahead). What it logs goes to stdout as well.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.errors import NodeUnreachable, PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.gateway.upstream import SlotRequest
from mesh_llm.lab.chaos.gate import Weather, gated
from mesh_llm.lab.member import MemberNode, MemberPart, progress, run_member, say, tell
from mesh_llm.transport.network import Network, Peer, Stream
from mesh_llm.types import Address, NodeId


@frozen
class StruckPart(MemberPart):
    client: bool = False
    embeddings: bool = False

    def config(self) -> NodeConfig:
        if self.client:
            return NodeConfig(
                home=Path(self.home),
                name=self.name,
                client=True,
                port=self.port,
                join=self.join,
                bind_ip="127.0.0.1",
                no_relay=True,
            )
        # By name: a class with slots is made twice, and `super()` would look for the first one.
        node = MemberPart.config(self)
        # A home without a mesh begins one all the same, with the key that it has.
        return replace(node, new_mesh=False, embeddings=self.embeddings)


class StruckNode(MemberNode):
    """A node whose links, peers and clock are as good as it is told."""

    def __init__(self, part: StruckPart) -> None:
        super().__init__(part, tell=tell, progress=progress)
        self._weather = Weather()
        self._clock_s = 0.0
        real = time.time
        time.time = lambda: real() + self._clock_s
        logging.getLogger("mesh_llm").addHandler(_Teller())

    def obey(self, line: bytes) -> None:
        if line.strip() == b"stop":
            self.stop()
            return
        document = json.loads(line)
        self._weather.cut = frozenset(document.get("cut", self._weather.cut))
        self._weather.delay_s = document.get("delay_s", self._weather.delay_s)
        self._clock_s = document.get("clock_s", self._clock_s)

    def _compose(self) -> None:
        super()._compose()
        self.data_links.through = lambda node, link: gated(link, node, self._weather)
        _hold_up_requests(self)
        _hold_up_messages(self)


def _hold_up_requests(node: StruckNode) -> None:
    """What goes to other nodes' engines, and every other stream."""
    links, mesh, weather = node.data_links, node.mesh, node._weather
    http, open_stream, on_stream = links.http, mesh.open, mesh.on_stream

    async def gated_http(to: NodeId, epoch: int, turn: SlotRequest | None = None) -> socket.socket:
        return gated(await http(to, epoch, turn), to, weather)

    async def open_unless_cut(to: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        if to in weather.cut:
            raise NodeUnreachable(f"there is no path to {mesh.name_of(to)}")
        return await open_stream(to, kind, header)

    async def on_stream_unless_cut(peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        if peer.id in weather.cut:
            stream.reset()
        else:
            await on_stream(peer, kind, header, stream)

    _replace(links, http=gated_http)
    _replace(mesh, open=open_unless_cut, on_stream=on_stream_unless_cut)


def _hold_up_messages(node: StruckNode) -> None:
    """What members tell each other, and new connections."""
    mesh, weather = node.mesh, node._weather
    on_message, on_peer, attach = mesh.on_message, mesh.on_peer, mesh.attach

    def on_message_unless_cut(peer: Peer, body: dict[str, Any]) -> None:
        if peer.id not in weather.cut:
            on_message(peer, body)

    def on_peer_with_ears(peer: Peer) -> None:
        send = peer.send

        def send_unless_cut(body: dict[str, Any]) -> None:
            if peer.id not in weather.cut:
                send(body)

        _replace(peer, send=send_unless_cut)
        on_peer(peer)

    def attach_network(network: Network, services: Any) -> None:
        connect = network.connect

        async def connect_unless_cut(to: NodeId, address: Address, **options: Any) -> Peer:
            if to in weather.cut:
                raise PeerLost(f"no answer from node {to[:10]}")
            return await connect(to, address, **options)

        _replace(network, connect=connect_unless_cut)
        attach(network, services)

    _replace(mesh, on_message=on_message_unless_cut, on_peer=on_peer_with_ears, attach=attach_network)


def _replace(what: object, **methods: object) -> None:
    """Of this object alone."""
    for name, method in methods.items():
        setattr(what, name, method)


class _Teller(logging.Handler):
    """Tells the owner, by a clock that does not jump."""

    def emit(self, record: logging.LogRecord) -> None:
        say({"told": record.getMessage(), "at": time.monotonic()})


def main() -> None:
    run_member(lambda line: StruckNode(StruckPart.from_line(line)))


if __name__ == "__main__":
    main()
