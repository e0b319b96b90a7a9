"""Settings and revocations on their way from node to node.

Whoever connects is told all of them, everybody else what is news, and passes that on. Only what was
verified is passed on, so that a peer that brings something forged has made it up itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mesh_llm.errors import CredentialRefused, Forged, MalformedMessage
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.messages import signed_from_fields, signed_to_document
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.network import Membership, Network, Peer
from mesh_llm.types import Role, Signed

CLAIMS_MESSAGE_BYTES = 64 << 10
"""Of settings and revocations in one message; JSON takes some more."""


log = logging.getLogger(__name__)

KIND, PROMOTION = "claims", "promotion"
_CLAIMS_LIMIT = 512
"""Of one kind in one message: the shortest are the creator's, whose credential is empty."""


class ClaimsExchange:
    def __init__(self, network: Network, on_news: Callable[[], None]) -> None:
        self._network = network
        self._on_news = on_news
        self.heard = asyncio.Event()
        """A member has told what it knows."""

    @property
    def _membership(self) -> Membership:
        return self._network.mesh

    def greet(self, peer: Peer) -> None:
        """Tell one who has just connected everything."""
        settings, revocations = self._membership.claims()
        self._send([peer], settings, revocations)

    def spread(self) -> None:
        """Tell everybody: this node has claimed something itself."""
        settings, revocations = self._membership.claims()
        self._send(self._network.peers.values(), settings, revocations)

    def receive(self, peer: Peer, body: dict[str, Any]) -> None:
        """Take what is new to this node, and pass it on."""
        if peer.role is Role.CLIENT:
            return
        settings, revocations = _read(body)
        fresh: list[Signed] = []
        before = set(self._membership.revocations.signed)
        try:
            for each in settings:
                fresh += [each] if self._membership.take_settings(each, now=time.time()) else []
            self._membership.take_revocations(revocations)
        except Forged as error:
            log.warning("closing peer=%s: it sent %s", peer.id[:8], error.message)
            peer.close(f"it sent {error.message}")
        if settings:
            self.heard.set()
        # Also what was good beside something forged: known here by now, it would be news to nobody later.
        revoked = [each for each in self._membership.revocations.signed if each not in before]
        if fresh or revoked:
            others = [other for other in self._network.peers.values() if other is not peer]
            self._send(others, fresh, revoked)
            self._on_news()

    def promoted(self, body: dict[str, Any]) -> bool:
        """Whether this node is an owner from now on; whoever brings it, its signatures decide."""
        membership, me = self._membership, self._network.id
        assert membership.mesh is not None
        try:
            credential = credentials.from_text(body.get("credential"))
            role = credentials.check(credential, membership.mesh, me)
        except CredentialRefused as error:
            log.info("promotion left out: %s", error.message)
            return False
        news = role is Role.OWNER and credentials.role_of(membership.credential) is Role.NODE
        if news and membership.revocations.strikes(credential) is None:
            membership.credential = credential
            return True
        return False

    def _send(self, peers: Iterable[Peer], settings: list[Signed], revocations: list[Signed]) -> None:
        messages = list(_messages(settings, revocations))
        for peer in list(peers):
            for message in messages:
                peer.send(message)


def promotion(credential: Credential) -> dict[str, Any]:
    return {"kind": PROMOTION, "credential": credentials.to_text(credential)}


def _messages(settings: list[Signed], revocations: list[Signed]) -> Iterator[dict[str, Any]]:
    """In pieces that fit into a frame."""
    for name, claims in (("settings", settings), ("revocations", revocations)):
        batch: list[dict[str, object]] = []
        size_bytes = 0
        for signed in claims:
            full = len(batch) >= _CLAIMS_LIMIT or size_bytes + signed.size_bytes > CLAIMS_MESSAGE_BYTES
            if batch and full:
                yield {"kind": KIND, name: batch}
                batch, size_bytes = [], 0
            batch.append(signed_to_document(signed))
            size_bytes += signed.size_bytes
        if batch:
            yield {"kind": KIND, name: batch}


def _read(body: dict[str, Any]) -> tuple[tuple[Signed, ...], tuple[Signed, ...]]:
    fields = Fields(body, KIND)
    try:
        return fields.items("settings", _CLAIMS_LIMIT, _signed), fields.items(
            "revocations", _CLAIMS_LIMIT, _signed
        )
    except MalformedMessage as error:
        log.info("message left out: %s", error.message)
        return (), ()


def _signed(document: object) -> Signed:
    return signed_from_fields(Fields(document, "claim"))
