"""How simulated nodes sign what they say and verify what others say: not at all, or as real nodes do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from hashlib import blake2b

from mesh_llm.membership.record import Record, Told, read_record
from mesh_llm.transport.claims import Claim, sign, signer_of
from mesh_llm.transport.credential import check, extend, from_text
from mesh_llm.transport.identity import Identity
from mesh_llm.types import MeshId, NodeId, Role, Signed


def node_id(name: object) -> NodeId:
    return NodeId(blake2b(str(name).encode(), digest_size=32).hexdigest())


def seal(text: str) -> Signed:
    """In place of a signature and a credential, and as long, where nobody cheats."""
    return Signed(text=text, signature="s" * 88, credential="c" * 140)


@lru_cache(maxsize=1 << 16)
def opened(told: Told) -> Record | None:
    """Read once for a thousand nodes."""
    return read_record(told)


class NoSigning:
    def id_of(self, name: object) -> NodeId:
        return node_id(name)

    def seal(self, name: object) -> Callable[[str], Signed]:
        return seal

    def open(self) -> Callable[[Told], Record | None]:
        """For one node."""
        return opened


class RealSigning(NoSigning):
    """Each with a key and an invite of the creator's, every record read and verified."""

    def __init__(self) -> None:
        self._creator = _identity("creator")
        self.mesh = MeshId(self._creator.id)

    def id_of(self, name: object) -> NodeId:
        return _identity(name).id

    def seal(self, name: object) -> Callable[[str], Signed]:
        identity = _identity(name)
        invite = identity.id[:16]
        credential = extend((), self.mesh, self._creator, identity.id, Role.NODE, invite)
        return lambda text: sign(identity, self.mesh, credential, Claim.RECORD, text)

    def open(self) -> Callable[[Told], Record | None]:
        checked: set[str] = set()

        def verified(told: Told) -> Record | None:
            assert told.signed is not None
            if told.signed.credential not in checked:
                # Checked once by every node; those of this process would find it checked by another one.
                checked.add(told.signed.credential)
                check(from_text(told.signed.credential), self.mesh, told.node)
            assert signer_of(told.signed, self.mesh, Claim.RECORD).node == told.node
            return read_record(told)

        return verified


@cache
def _identity(name: object) -> Identity:
    return Identity.from_secret(blake2b(f"key of {name}".encode(), digest_size=32).digest())
