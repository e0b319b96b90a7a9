"""Why a connection ends, as a number on the wire and a sentence for people."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

from mesh_llm.frozen import frozen

REASON_LIMIT = 200


class Code(IntEnum):
    """Application codes of QUIC's closing. A peer's is a hint: whether and when to try again."""

    UNKNOWN = 0
    """The other side's process ended, or the path did."""
    WRONG = 1
    EXPIRED = 2
    REVOKED = 3
    TOO_OLD = 4
    """The one who is told speaks an older protocol."""
    TOO_NEW = 5
    BUSY = 6
    DUPLICATE = 7
    """There is a connection between the two already."""
    OWN_ID = 8
    """Two nodes run with one identity."""
    MALFORMED = 9
    TIMEOUT = 10
    REPLACED = 11
    OVERFLOW = 12
    LEAVING = 13
    INTERNAL = 14
    CLOSED = 15
    """By the node, for a reason of its own."""
    USED = 16
    """As many have come in by the invite as it was made for."""
    CROWDED = 17
    """As many clients with the same invite are connected as one node serves."""


SENTENCES = {
    Code.WRONG: "the other node does not know this invite or membership",
    Code.EXPIRED: "the invite has expired",
    Code.REVOKED: "expelled: the invite was revoked",
    Code.USED: "the invite has been used up",
    Code.CROWDED: "too many clients with the same invite are connected",
    Code.TOO_OLD: "the other node speaks a newer protocol",
    Code.TOO_NEW: "the other node speaks an older protocol",
    Code.BUSY: "the other node is busy with too many attempts to join",
    Code.DUPLICATE: "there is a connection already",
    Code.OWN_ID: "another node runs with this node's identity",
    Code.MALFORMED: "what was sent is not of this protocol",
    Code.TIMEOUT: "no message arrived in time",
    Code.REPLACED: "replaced by a newer connection",
    Code.OVERFLOW: "too many messages wait to be sent",
    Code.LEAVING: "the other node stopped",
    Code.INTERNAL: "an internal error",
}


@frozen
class CloseReason:
    code: Code
    reason: str


_BY_PEER = re.compile(r"closed by peer: (?:(.*) \(code (\d+)\)|(\d+))", re.DOTALL)


def close(connection: Any, code: Code, reason: str = "") -> CloseReason:
    """Close at once; the other side is told code and reason if it can still be reached."""
    closing = CloseReason(code=code, reason=reason or SENTENCES.get(code, ""))
    connection.close(int(code), _short(closing.reason).encode())
    return closing


def closing_of(text: str) -> CloseReason:
    """From iroh's words for why a connection ended."""
    match = _BY_PEER.fullmatch(text)
    if match is None:
        return CloseReason(code=Code.UNKNOWN, reason=f"the connection was lost ({_short(text)})")
    number = int(match[2] or match[3] or 0)
    code = Code(number) if number in Code._value2member_map_ else Code.UNKNOWN
    reason = _short(match[1] or "") or SENTENCES.get(code) or "the other node closed the connection"
    return CloseReason(code=code, reason=reason)


def _short(text: str) -> str:
    """What a peer says is shown to people: printable, and not much of it."""
    return "".join(sign if sign.isprintable() else " " for sign in text)[:REASON_LIMIT]
