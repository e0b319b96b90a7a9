"""The bounds of one gateway; the reasons for the numbers are in `defaults`."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.defaults import (
    GATEWAY_BEAT_S,
    GATEWAY_BODY_LATE_S,
    GATEWAY_BODY_LIMIT_BYTES,
    GATEWAY_CLIENT_IDLE_S,
    GATEWAY_CONNECTIONS,
    GATEWAY_HEAD_S,
    GATEWAY_IDLE_CONNECTIONS,
    GATEWAY_KEPT_BYTES,
    GATEWAY_REPLAY_BYTES,
    GATEWAY_RESUME_S,
    GATEWAY_SILENCE_S,
    GATEWAY_UPLOAD_LATE_S,
    GUESTS_PER_ACCOUNT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
