"""Who may claim what: the one place where the word of a member is verified.

| claim | signed by | counts |
| --- | --- | --- |
| a record: facts, that it lives, that it left | the node that it is about | while its credential holds |
| settings | an owner | the highest version, while the owner's credential holds |
| a revoked invite | whoever made it, one above in the chain, an owner | for credentials that have it |
| the origin of a forwarded stream | the one who opens it | once, for the receiver's own challenge |

Each is signed over the mesh's id and its kind, and travels with the signer's credential: whoever receives
it can verify it, no matter how many peers it went through. What is not signed is first-hand and goes no
further (pings, whom a node hears), or a hint (that a node is suspect or dead, why a connection was closed).
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from functools import lru_cache

from mesh_llm.defaults import CLAIMS_CHECKED
from mesh_llm.errors import CredentialRefused, Forged
from mesh_llm.frozen import frozen
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.identity import Identity, verify
from mesh_llm.types import MeshId, NodeId, Role, Signed


class Claim(StrEnum):
    RECORD = "record"
    SETTINGS = "settings"
    REVOCATION = "revocation"
    STREAM = "stream"


_NOUNS = {
    Claim.RECORD: "a record",
    Claim.SETTINGS: "settings",
    Claim.REVOCATION: "a revocation",
    Claim.STREAM: "a stream",
}


@frozen
class Signer:
    node: NodeId
    role: Role
    credential: Credential


def sign(identity: Identity, mesh: MeshId, credential: Credential, claim: Claim, text: str) -> Signed:
    signature = identity.sign(_message(mesh, claim, text))
    return Signed(
        text=text,
        signature=base64.urlsafe_b64encode(signature).decode(),
        credential=credentials.to_text(credential),
    )


def signer_of(signed: Signed, mesh: MeshId, claim: Claim) -> Signer:
    """Who signed it, by which right; `Forged` where nobody with a credential of this mesh did.

    Whether that right was revoked meanwhile is another question: honest nodes may not all have heard of it.
    """
    try:
        signer = _holder(signed.credential, mesh)
    except CredentialRefused as error:
        raise Forged(f"{_NOUNS[claim]} of a node that is not a member: {error.message}") from None
    try:
        signature = base64.b64decode(signed.signature, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    if not verify(signer.node, _message(mesh, claim, signed.text), signature):
        raise Forged(f"{_NOUNS[claim]} with an invalid signature")
    return signer


def holder_of_right(credential: str, mesh: MeshId) -> Signer:
    """Whom a credential makes a member, before anything that came with it is looked at; raises `Forged`."""
    try:
        return _holder(credential, mesh)
    except CredentialRefused as error:
        raise Forged(f"a claim of a node that is not a member: {error.message}") from None


@lru_cache(maxsize=CLAIMS_CHECKED)
def _holder(text: str, mesh: MeshId) -> Signer:
    credential = credentials.from_text(text)
    node = credentials.holder_of(credential, mesh)
    return Signer(node=node, role=credentials.check(credential, mesh, node), credential=credential)


def _message(mesh: MeshId, claim: Claim, text: str) -> bytes:
    return f"mesh-llm {claim} 1\0".encode() + bytes.fromhex(mesh) + text.encode(errors="surrogatepass")
