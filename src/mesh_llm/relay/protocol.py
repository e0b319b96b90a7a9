"""What an iroh endpoint and its relay say to each other, as bytes; no sockets here.

Binary WebSocket messages, the first byte says which kind. Before anything else the
relay sends a challenge, and the endpoint proves with a signature that the id
which it gives is its own:

    relay  → 0, challenge (16)
    client → 1, id (32), 64, signature (64) over blake3's derive-key of the challenge
    relay  → 2                                   welcome
           → 3, length, reason                   refused

From then on:

    client → 4, destination (32), ECN (1), datagram
    relay  → 6, source (32),      ECN (1), datagram              the same, to its destination
    client → 5, destination (32), ECN (1), size (2), datagrams   several of equal size, but for the last
    relay  → 7, source (32),      ECN (1), size (2), datagrams
    relay  → 8, id (32)                          somebody that this client talked with is gone
    either → 9, payload (8)                      to be answered with
    either → 10, payload (8)
    relay  → 13, status (1)                      only in version 2

The types are QUIC integers of variable length; all that exist take one byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import blake3

from mesh_llm.defaults import RELAY_PACKET_LIMIT_BYTES
from mesh_llm.frozen import frozen

PATH = "/relay"
VERSIONS = ("iroh-relay-v2", "iroh-relay-v1")
"""WebSocket subprotocols, the best first."""

ID_BYTES = 32
CHALLENGE_BYTES = 16
SIGNATURE_BYTES = 64
PING_BYTES = 8
REASON_LIMIT_BYTES = 127
"""Its length is an integer of variable length, too, and stays within one byte."""

_SIGNED_CONTEXT = "iroh-relay handshake v1 challenge signature"
_SEND_HEAD_BYTES = 1 + ID_BYTES + 1
_BATCH_HEAD_BYTES = _SEND_HEAD_BYTES + 2


class FrameKind(IntEnum):
    CHALLENGE = 0
    AUTHENTICATION = 1
    CONFIRMED = 2
    DENIED = 3
    SEND = 4
    SEND_BATCH = 5
    DELIVER = 6
    DELIVER_BATCH = 7
    GONE = 8
    PING = 9
    PONG = 10
    STATUS = 13


class RelayStatus(IntEnum):
    HEALTHY = 0
    """After something else: all is well again."""
    SAME_ID = 1
    """Another endpoint came with the same id, and gets what this one got."""


class BadFrame(ValueError):
    """A message that no endpoint sends. Its text is ours, with nothing of the sender's in it."""


@frozen
class Authentication:
    id: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class RelaySend:
    """Datagrams on their way; positional, as there is one for each that is relayed."""

    destination: bytes
    batch: bool
    body: bytes
    """From the ECN byte on: delivered as it came."""


@dataclass(frozen=True, slots=True)
class RelayPing:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    payload: bytes


def challenge(random: bytes) -> bytes:
    assert len(random) == CHALLENGE_BYTES
    return bytes([FrameKind.CHALLENGE]) + random


def signed_message(random: bytes) -> bytes:
    """What the endpoint signs, instead of the challenge: nothing that means anything elsewhere."""
    return blake3.blake3(random, derive_key_context=_SIGNED_CONTEXT).digest()


def authentication(id: bytes, signature: bytes) -> bytes:
    return bytes([FrameKind.AUTHENTICATION]) + id + bytes([SIGNATURE_BYTES]) + signature


def parse_authentication(frame: bytes) -> Authentication:
    if len(frame) != 1 + ID_BYTES + 1 + SIGNATURE_BYTES or frame[0] != FrameKind.AUTHENTICATION:
        raise BadFrame("this is not an authentication message")
    if frame[1 + ID_BYTES] != SIGNATURE_BYTES:
        raise BadFrame("a signature has 64 bytes")
    return Authentication(id=frame[1 : 1 + ID_BYTES], signature=frame[-SIGNATURE_BYTES:])


def confirmed() -> bytes:
    return bytes([FrameKind.CONFIRMED])


def denied(reason: str) -> bytes:
    text = reason.encode("ascii", errors="replace")[:REASON_LIMIT_BYTES]
    return bytes([FrameKind.DENIED, len(text)]) + text


def parse(frame: bytes) -> RelaySend | RelayPing | Pong:
    """A message of an endpoint that has been let in."""
    kind = frame[0] if frame else -1
    if kind == FrameKind.SEND:
        return _send(frame)
    if kind == FrameKind.SEND_BATCH:
        return _send_batch(frame)
    if kind in (FrameKind.PING, FrameKind.PONG):
        if len(frame) != 1 + PING_BYTES:
            raise BadFrame("pings have 8 bytes")
        return (RelayPing if kind == FrameKind.PING else Pong)(frame[1:])
    raise BadFrame("a kind of message that clients do not send")


def _send(frame: bytes) -> RelaySend:
    if not _SEND_HEAD_BYTES < len(frame) <= 1 + RELAY_PACKET_LIMIT_BYTES:
        raise BadFrame("a datagram that is empty or too long")
    return RelaySend(frame[1 : 1 + ID_BYTES], False, frame[1 + ID_BYTES :])


def _send_batch(frame: bytes) -> RelaySend:
    if not _BATCH_HEAD_BYTES < len(frame) <= 1 + RELAY_PACKET_LIMIT_BYTES:
        raise BadFrame("datagrams that are empty or too long")
    if frame[_SEND_HEAD_BYTES:_BATCH_HEAD_BYTES] == b"\0\0":
        raise BadFrame("datagrams of no size")
    return RelaySend(frame[1 : 1 + ID_BYTES], True, frame[1 + ID_BYTES :])


def deliver(source: bytes, send: RelaySend) -> bytes:
    return (b"\7" if send.batch else b"\6") + source + send.body


def gone(id: bytes) -> bytes:
    return bytes([FrameKind.GONE]) + id


def ping(payload: bytes) -> bytes:
    return bytes([FrameKind.PING]) + payload


def pong(payload: bytes) -> bytes:
    return bytes([FrameKind.PONG]) + payload


def status(value: RelayStatus) -> bytes:
    return bytes([FrameKind.STATUS, value])
