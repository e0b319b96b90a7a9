"""A relay for iroh endpoints that cannot reach each other.

Every endpoint keeps one WebSocket to the relay, and proves its id when it connects. The
relay passes datagrams from one to the other: it cannot read them, they are encrypted
between the endpoints. It keeps nothing and promises nothing: what does not fit is
dropped, and QUIC at both ends makes up for that.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import socket
import ssl
from dataclasses import field
from typing import cast

from aiohttp import WSMsgType, web

from mesh_llm.defaults import RELAY_STOP_S
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.loopback import is_loopback
from mesh_llm.relay import protocol as protocol
from mesh_llm.relay.client import RelayClient
from mesh_llm.relay.connections import Connection, RelayConnections
from mesh_llm.relay.limits import RelayLimits
from mesh_llm.relay.metrics import CONTENT_TYPE, NO_ROOM, UNKNOWN, RelayCounters, RelayMetrics
from mesh_llm.relay.protocol import BadFrame
from mesh_llm.transport.identity import verify
from mesh_llm.types import NodeId

RELAY_FRAME_LIMIT_BYTES = 1 << 20
"""Of a WebSocket message: the protocol's own limit."""
RELAY_MESSAGE_COST_BYTES = 1 << 10
"""What a message costs its sender at least: passing on a small one is as much work as a large one."""
RELAY_SAME_ID = 4
"""Connections with one id: a node that came back before its old ones were missed, a cloned home or two."""
RELAY_TOKEN_CHARACTERS = 255
"""It travels in invites, after one byte that holds its length."""


log = logging.getLogger(__name__)

_TOKEN = re.compile(rf"[!-~]{{1,{RELAY_TOKEN_CHARACTERS}}}")
_CHALLENGE = re.compile(r"[A-Za-z0-9._-]{1,64}")


@frozen
class RelayConfig:
    token: str | None = field(default=None, repr=False)
    """Asked of every client as a bearer token."""
    allowed: frozenset[bytes] | None = None
    """The only ids that may connect; None lets everybody in who has the token."""
    metrics: bool = False
    limits: RelayLimits = field(default_factory=RelayLimits)

    def check(self, listen: str) -> None:
        """Refuse a relay that anybody could use."""
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise UsageError(
                f"a relay's token has 1 to {RELAY_TOKEN_CHARACTERS} letters, digits and signs, no spaces"
            )
        if self.token is None and self.allowed is None and not is_loopback(listen):
            raise UsageError(
                f"a relay on {listen} would serve anybody",
                hint="set MESH_LLM_RELAY_TOKEN, or name the nodes with --allow",
            )


class RelayServer:
    """Relays from `start` until `stop`."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self.counters = RelayCounters()
        self._clients: dict[bytes, RelayClient] = {}
        """By id, the newest of each."""
        self._outdated: dict[bytes, list[RelayClient]] = {}
        """Those that a newer one with the same id has replaced, and that are still connected."""
        self._everyone: set[RelayClient] = set()
        self._metrics = RelayMetrics(self.counters, lambda: len(self._everyone))
        self._door: RelayConnections | None = None
        self._listening: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before `start`."""
        return self._port

    @property
    def clients(self) -> frozenset[bytes]:
        """The ids that are connected now."""
        return frozenset(self._clients)

    @property
    def connections(self) -> int:
        """Those of `clients`, and older ones with the same ids."""
        return len(self._everyone)

    def waiting_bytes(self, id: bytes) -> int:
        """What a client has not read yet; 0 for one who is not here."""
        client = self._clients.get(id)
        return 0 if client is None else client.waiting_bytes

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve on a bound socket, which is the server's from now on."""
        self._port = listener.getsockname()[1]
        self._door = RelayConnections(self._handle, self._config.limits, self.counters)
        handshake_s = None if tls is None else self._config.limits.handshake_s
        self._listening = await asyncio.get_running_loop().create_server(
            self._door, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s
        )
        self._watching = asyncio.create_task(self._watch(), name="relay: silent clients")
        log.info("relay listening port=%d tls=%s", self._port, tls is not None)

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        for client in list(self._everyone):
            client.dismiss()
        if self._door is not None:
            await self._door.shutdown(RELAY_STOP_S)
            self._door = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET"})
        if request.path == protocol.PATH:
            return await self._relay(request)
        if request.path == "/ping":
            return web.Response(text="pong\n", headers={"Access-Control-Allow-Origin": "*"})
        if request.path == "/generate_204":
            return _nothing(request)
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        if request.path == "/metrics" and self._config.metrics:
            return self._show_metrics(request)
        return web.Response(status=404, text="this is a mesh-llm relay\n")

    def _show_metrics(self, request: web.BaseRequest) -> web.Response:
        token = self._config.token
        if not _is_local(request) and (token is None or not _has_token(request, token)):
            return _unauthorized()
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _relay(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._config.token is not None and not _has_token(request, self._config.token):
            return self._refuse("wrong token", _unauthorized())
        socket = web.WebSocketResponse(
            protocols=protocol.VERSIONS,
            max_msg_size=RELAY_FRAME_LIMIT_BYTES,
            # Datagrams are encrypted: there is nothing to compress, and bombs are kept out.
            compress=False,
            timeout=RELAY_STOP_S,
        )
        ready = socket.can_prepare(request)
        if not ready or ready.protocol is None:
            return self._refuse(
                "no relay client", web.Response(status=400, text="this is not a relay client\n")
            )
        await socket.prepare(request)
        try:
            await self._converse(request, socket, ready.protocol)
        except BadFrame as error:
            self.counters.removed["bad message"] += 1
            log.info("client sent away error=%s", error)
            await socket.close(code=1002)
        return socket

    def _refuse(self, reason: str, response: web.Response) -> web.Response:
        self.counters.refused[reason] += 1
        response.force_close()
        return response

    async def _converse(self, request: web.BaseRequest, socket: web.WebSocketResponse, version: str) -> None:
        id = await self._authenticate(socket)
        if id is None or (transport := request.transport) is None:
            return
        if (refusal := self._refusal(id)) is not None:
            self.counters.refused[refusal] += 1
            await socket.send_bytes(protocol.denied(refusal))
            await socket.close(code=1008)
            return
        client = RelayClient(
            id=id, transport=transport, version=version, limits=self._config.limits, now=_now()
        )
        cast(Connection, request.protocol).admitted()
        self._join(client)
        try:
            await self._serve(socket, client)
        finally:
            self._leave(client)

    async def _authenticate(self, socket: web.WebSocketResponse) -> bytes | None:
        """The id that the client has proved to be its own. The connection's deadline bounds the wait."""
        random = secrets.token_bytes(protocol.CHALLENGE_BYTES)
        await socket.send_bytes(protocol.challenge(random))
        message = await socket.receive()
        if message.type is not WSMsgType.BINARY:
            self.counters.refused["left during the handshake"] += 1
            return None
        claim = protocol.parse_authentication(message.data)
        if not verify(NodeId(claim.id.hex()), protocol.signed_message(random), claim.signature):
            self.counters.refused["wrong signature"] += 1
            await socket.send_bytes(protocol.denied("wrong signature"))
            await socket.close(code=1008)
            return None
        return claim.id

    def _refusal(self, id: bytes) -> str | None:
        allowed = self._config.allowed
        if allowed is not None and id not in allowed:
            return "not on the list"
        if len(self._everyone) >= self._config.limits.clients:
            return "the relay is full"
        return None

    def _join(self, client: RelayClient) -> None:
        old = self._clients.get(client.id)
        self._clients[client.id] = client
        self._everyone.add(client)
        self.counters.admitted += 1
        log.info("client joined id=%s version=%s clients=%d", client.name, client.version, len(self._clients))
        client.tell(protocol.confirmed())
        if old is not None:
            self._replace(old, client)

    def _replace(self, old: RelayClient, client: RelayClient) -> None:
        """What comes for this id goes to the newer connection from now on.

        Closing the older one would be a mistake: where two live endpoints share an id (a home that
        was cloned) each would come back at once and close the other's, a hundred times a second.
        """
        self.counters.replaced += 1
        client.contacts = old.contacts
        outdated = self._outdated.setdefault(client.id, [])
        outdated.append(old)
        self._tell_status(old, protocol.RelayStatus.SAME_ID)
        if len(outdated) >= RELAY_SAME_ID:
            self._remove(min(outdated, key=lambda one: one.heard_at), "same id too often")

    def _leave(self, client: RelayClient) -> None:
        self._everyone.discard(client)
        log.info("client left id=%s connections=%d", client.name, len(self._everyone))
        outdated = self._outdated.get(client.id, [])
        if self._clients.get(client.id) is not client:
            outdated.remove(client)
        elif outdated:
            self._clients[client.id] = outdated.pop()
            self._tell_status(self._clients[client.id], protocol.RelayStatus.HEALTHY)
        else:
            del self._clients[client.id]
            self._tell_gone(client)
        if not outdated:
            self._outdated.pop(client.id, None)

    def _tell_status(self, client: RelayClient, status: protocol.RelayStatus) -> None:
        if client.version == protocol.VERSIONS[0]:
            client.tell(protocol.status(status))

    def _tell_gone(self, client: RelayClient) -> None:
        notice = protocol.gone(client.id)
        for id in client.contacts:
            if (contact := self._clients.get(id)) is not None:
                contact.contacts.discard(client.id)
                contact.tell(notice)

    async def _serve(self, socket: web.WebSocketResponse, client: RelayClient) -> None:
        while True:
            message = await socket.receive()
            if message.type is not WSMsgType.BINARY:
                if message.type is WSMsgType.TEXT:
                    raise BadFrame("text")
                return
            now = client.heard_at = _now()
            frame = protocol.parse(message.data)
            if isinstance(frame, protocol.RelaySend):
                self._forward(client, frame)
            elif isinstance(frame, protocol.RelayPing):
                client.tell(protocol.pong(frame.payload))
            pause_s = client.allowance.spend(max(len(message.data), RELAY_MESSAGE_COST_BYTES), now)
            if pause_s > 0:
                # Nothing is read meanwhile: TCP slows the client down, and nobody else.
                self.counters.throttled += 1
                await asyncio.sleep(pause_s)
                client.heard_at = _now()

    def _forward(self, client: RelayClient, send: protocol.RelaySend) -> None:
        counters = self.counters
        counters.frames += 1
        counters.bytes += len(send.body)
        to = self._clients.get(send.destination)
        if to is None:
            counters.dropped[UNKNOWN] += 1
        elif to.deliver(protocol.deliver(client.id, send)):
            counters.delivered += 1
            client.meet(to)
        else:
            counters.dropped[NO_ROOM] += 1

    async def _watch(self) -> None:
        """Ask the silent ones whether they are there; send away those who do not answer or do not read."""
        limits = self._config.limits
        while True:
            await asyncio.sleep(limits.ping_s / 3)
            now = _now()
            for client in list(self._everyone):
                if now - client.heard_at > limits.dead_s:
                    self._remove(client, "silent")
                elif client.stuck_for_s(now) > limits.dead_s:
                    self._remove(client, "does not read")
                elif now - max(client.heard_at, client.asked_at) > limits.ping_s:
                    client.asked_at = now
                    client.tell(protocol.ping(secrets.token_bytes(protocol.PING_BYTES)))

    def _remove(self, client: RelayClient, reason: str) -> None:
        self.counters.removed[reason] += 1
        log.info("client sent away id=%s reason=%s", client.name, reason)
        client.abort()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _has_token(request: web.BaseRequest, token: str) -> bool:
    scheme, _, offered = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(offered.strip().encode(errors="surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


def _is_local(request: web.BaseRequest) -> bool:
    """From this machine, and not through a proxy that runs here."""
    if any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")):
        return False
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    return isinstance(peer, tuple) and is_loopback(str(peer[0]))


def _unauthorized() -> web.Response:
    return web.Response(status=401, text="wrong token\n", headers={"WWW-Authenticate": "Bearer"})


def _nothing(request: web.BaseRequest) -> web.Response:
    """By this an endpoint notices that a hotel's log-in page answers in the relay's place."""
    challenge = request.headers.get("X-Iroh-Challenge", "")
    known = {"X-Iroh-Response": f"response {challenge}"} if _CHALLENGE.fullmatch(challenge) else {}
    return web.Response(status=204, headers=known)
