"""The key that a node is known by."""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache
from typing import Any

from mesh_llm.defaults import CLAIMS_CHECKED
from mesh_llm.frozen import frozen
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.types import NodeId

SECRET_BYTES = 32
SIGNATURE_BYTES = 64
_ID = re.compile("[0-9a-f]{64}")


@frozen
class Identity:
    """An ed25519 key; its public half is the node's id, and iroh's endpoint id."""

    id: NodeId
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> Identity:
        if len(secret) != SECRET_BYTES:
            raise ValueError("a node's secret has 32 bytes")
        public = iroh().SecretKey.from_bytes(secret).public().to_bytes()
        return cls(id=NodeId(public.hex()), secret=secret)

    def sign(self, message: bytes) -> bytes:
        return bytes(iroh().SecretKey.from_bytes(self.secret).sign(message).to_bytes())


def verify(node: NodeId, message: bytes, signature: bytes) -> bool:
    """Whether `node` signed `message`."""
    if not is_node_id(node) or len(signature) != SIGNATURE_BYTES:
        return False
    ffi = iroh()
    try:
        _key(node).verify(message, ffi.Signature.from_bytes(signature))
    except ffi.IrohError:
        return False
    return True


@lru_cache(maxsize=CLAIMS_CHECKED)
def _key(node: NodeId) -> Any:
    """Members sign again and again; to read a key takes a sixth of a verification."""
    return iroh().EndpointId.from_bytes(bytes.fromhex(node))


def is_node_id(value: object) -> bool:
    """Whether it looks like one; the key behind it may still not exist."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None
