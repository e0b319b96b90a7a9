"""The bounds of one gateway; the reasons for the numbers are in `defaults`."""

from __future__ import annotations

from mesh_llm.defaults import GUESTS_PER_ACCOUNT
from mesh_llm.frozen import frozen

GATEWAY_BODY_LIMIT_BYTES = 256 << 20
"""Dozens of photographs in base64, or a million tokens many times over; no more than a machine can hold."""
GATEWAY_REPLAY_BYTES = 16 << 20
"""Kept to be sent again: every chat with a few photographs; what is larger goes through, once."""
GATEWAY_KEPT_BYTES = 256 << 20
"""Of all requests together; hundreds of long chats, or a dozen albums."""
GATEWAY_RESUME_S = 120.0
"""For the mesh to serve again: long enough to load a large model from disk, short enough for a person."""
GATEWAY_BEAT_S = 5.0
"""Without a byte, before a stream gives a sign of life, or twice that: proxies give up after 30 s or more."""
GATEWAY_SILENCE_S = 600.0
"""A long prompt on a slow mesh takes minutes without a byte; after ten nobody is working on it."""
GATEWAY_CLIENT_IDLE_S = 75.0
"""For a client to send its next request: what web servers usually grant."""
GATEWAY_HEAD_S = 20.0
"""From the first byte of a request's head to its last: it fits into a few packets, on the slowest line."""
GATEWAY_BODY_LATE_S = 2.0
"""Behind that pace, before such a connection makes room: a lost packet or two cost less."""
GATEWAY_UPLOAD_LATE_S = 20.0
"""Behind that pace, for a body too large to be read before its turn: a slot waits for it."""
GATEWAY_CONNECTIONS = 512
"""Of clients: all who wait in the queue and as many again; half of the descriptors that a process has."""
GATEWAY_IDLE_CONNECTIONS = 128
"""Of them between two requests: the one that has been idle for longest makes room, as it may at any time."""


@frozen
class Limits:
    body_bytes: int = GATEWAY_BODY_LIMIT_BYTES
    replay_bytes: int = GATEWAY_REPLAY_BYTES
    silence_s: float = GATEWAY_SILENCE_S
    kept_bytes: int = GATEWAY_KEPT_BYTES
    resume_s: float = GATEWAY_RESUME_S
    beat_s: float = GATEWAY_BEAT_S
    connections: int = GATEWAY_CONNECTIONS
    connections_per_account: int = GUESTS_PER_ACCOUNT
    idle_connections: int = GATEWAY_IDLE_CONNECTIONS
    idle_s: float = GATEWAY_CLIENT_IDLE_S
    body_late_s: float = GATEWAY_BODY_LATE_S
    upload_late_s: float = GATEWAY_UPLOAD_LATE_S
    head_s: float = GATEWAY_HEAD_S
