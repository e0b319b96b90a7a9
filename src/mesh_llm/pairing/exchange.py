"""The conversation of two machines that pair: a key exchange by the code (SPAKE2), then the token.

It runs over a QUIC connection, and the exchange names the keys of both ends. Somebody in between, who has
other keys, does not arrive at the same secret, whatever is passed on; and whoever does not know the code
learns nothing from a conversation but that one guess was wrong.

    joiner → owner   version, name, SPAKE2 message
    owner  → joiner  SPAKE2 message, or a refusal
    joiner → owner   proof that it has the secret
    owner  → joiner  proof that it has the secret, or a refusal
    owner  → joiner  the token once a person has agreed, or a refusal
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

from mesh_llm.errors import JoinRefused, PeerLost
from mesh_llm.sanitise import NAME_CHARS, clean
from mesh_llm.transport.stream import Stream
from mesh_llm.types import NodeId

ALPN = b"mesh-llm/pair/1"
VERSION = 1
CODE_DIGITS = 6
DOCUMENT_LIMIT_BYTES = 4096
"""Of each message: a token has some hundred characters."""
_JOINER, _OWNER = b"joiner", b"owner"


class Refusal(StrEnum):
    """Why an owner's machine ends a conversation. Its words are ours: nobody else's text is shown."""

    WRONG = "wrong"
    ATTEMPTS = "attempts"
    BUSY = "busy"
    DECLINED = "declined"
    VERSION = "version"


_SENTENCES: dict[Refusal, tuple[str, str]] = {
    Refusal.WRONG: ("the code is wrong", "look at the owner's screen and type it again"),
    Refusal.ATTEMPTS: (
        "there were ten wrong codes within an hour, and that mesh takes no more",
        "use an invite token: `mesh-llm invite` on a member prints one",
    ),
    Refusal.BUSY: ("another machine is pairing with that mesh now", "try again in a minute"),
    Refusal.DECLINED: ("the owner of the mesh did not agree", "ask again, or ask for an invite token"),
    Refusal.VERSION: ("that mesh pairs in another way", "update mesh-llm on both machines"),
}


class PairingRefused(Exception):
    """The owner's side ends the conversation."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


def new_code() -> str:
    return f"{secrets.randbelow(10**CODE_DIGITS):0{CODE_DIGITS}}"


def shown(code: str) -> str:
    """For people: in two groups."""
    half = len(code) // 2
    return f"{code[:half]} {code[half:]}"


def typed(text: str) -> str | None:
    """The code that somebody typed, with blanks or hyphens as they like; None if it is none."""
    digits = "".join(sign for sign in text if sign not in " -\t")
    return digits if len(digits) == CODE_DIGITS and digits.isascii() and digits.isdigit() else None


# -- the owner's side -----------------------------------------------------------------------------


async def greet(stream: Stream) -> tuple[str, bytes]:
    """The name that the other machine claims, and its message."""
    document = await stream.read_document(DOCUMENT_LIMIT_BYTES)
    if document.get("version") != VERSION:
        raise PairingRefused(Refusal.VERSION)
    name = document.get("name")
    return clean(name, NAME_CHARS) if isinstance(name, str) and name else "a machine", _hex(document, "pake")


async def check(stream: Stream, message: bytes, *, code: str, own: NodeId, other: NodeId) -> None:
    """Returns when the other machine has proven that it knows the code, and been shown that we do."""
    from spake2 import SPAKE2_B

    side = SPAKE2_B(code.encode(), idA=bytes.fromhex(other), idB=bytes.fromhex(own))
    answer, secret = await asyncio.to_thread(_exchanged, side, message)
    await stream.write_document({"pake": answer.hex()})
    proof = _hex(await stream.read_document(DOCUMENT_LIMIT_BYTES), "proof")
    if secret is None or not hmac.compare_digest(proof, _proof(secret, _JOINER)):
        raise PairingRefused(Refusal.WRONG)
    await stream.write_document({"proof": _proof(secret, _OWNER).hex()})


async def give(stream: Stream, token: str) -> None:
    await stream.write_document({"token": token})


async def refuse(stream: Stream, reason: Refusal) -> None:
    await stream.write_document({"refused": reason.value})


# -- the side that wants in -----------------------------------------------------------------------


async def prove(stream: Stream, *, code: str, name: str, own: NodeId, other: NodeId) -> None:
    """Returns when both sides have proven that they know the code."""
    from spake2 import SPAKE2_A

    side = SPAKE2_A(code.encode(), idA=bytes.fromhex(own), idB=bytes.fromhex(other))
    message = await asyncio.to_thread(side.start)
    await stream.write_document({"version": VERSION, "name": name, "pake": message.hex()})
    answer = _hex(_heard(await stream.read_document(DOCUMENT_LIMIT_BYTES)), "pake")
    secret = await asyncio.to_thread(_secret, side, answer)
    if secret is None:
        raise JoinRefused("that machine does not pair as it should", hint="do not trust it")
    await stream.write_document({"proof": _proof(secret, _JOINER).hex()})
    proof = _hex(_heard(await stream.read_document(DOCUMENT_LIMIT_BYTES)), "proof")
    if not hmac.compare_digest(proof, _proof(secret, _OWNER)):
        raise JoinRefused(
            "that machine does not know the code", hint="do not trust it: somebody announces a mesh as yours"
        )


async def receive(stream: Stream) -> str:
    """The token, when the owner has agreed."""
    token = _heard(await stream.read_document(DOCUMENT_LIMIT_BYTES)).get("token")
    if not isinstance(token, str):
        raise PeerLost("the other machine sent no token")
    return token


# -- both -----------------------------------------------------------------------------------------


def stream_in(group: asyncio.TaskGroup, pair: Any) -> Stream:
    """iroh's pair of streams, with an owner for what the stream still has to do at its end."""

    def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
        group.create_task(work, name=name)

    return Stream(pair, spawn)


def _heard(document: dict[str, Any]) -> dict[str, Any]:
    if "refused" not in document:
        return document
    try:
        sentence, hint = _SENTENCES[Refusal(document["refused"])]
    except ValueError:
        sentence, hint = "that mesh does not let this machine in", "ask for an invite token"
    raise JoinRefused(sentence, hint=hint)


def _exchanged(side: Any, message: bytes) -> tuple[bytes, bytes | None]:
    return side.start(), _secret(side, message)


def _secret(side: Any, message: bytes) -> bytes | None:
    """None where the other side's message is not one of the exchange."""
    try:
        return bytes(side.finish(message))
    except Exception:
        # The library raises errors of many kinds, ValueError and AssertionError among them.
        return None


def _proof(secret: bytes, side: bytes) -> bytes:
    return hmac.digest(secret, b"mesh-llm pairing, " + side, hashlib.sha256)


def _hex(document: dict[str, Any], field: str) -> bytes:
    try:
        return bytes.fromhex(document[field])
    except (KeyError, TypeError, ValueError):
        raise PeerLost(f"the other machine sent no {field}") from None
