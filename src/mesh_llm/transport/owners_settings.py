"""The mesh's settings as one of its owners has signed them."""

from __future__ import annotations

import json

from mesh_llm.errors import Forged, MalformedMessage
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.transport.claims import Claim, Signer, signer_of
from mesh_llm.types import MeshId, NodeId, Role, Signed

SETTINGS_BYTES = 32 << 10
"""As they are signed: layers by name for hundreds of nodes."""


@frozen
class OwnersSettings:
    settings: MeshSettings
    signer: Signer
    signed: Signed

    @property
    def rank(self) -> tuple[int, NodeId, str, str]:
        """One version twice: all nodes have to choose the same one of them."""
        return self.settings.version, self.signer.node, self.signed.text, self.signed.credential


def settings_text(settings: MeshSettings) -> str:
    """What an owner signs."""
    return json.dumps({"settings": settings_to_document(settings)}, separators=(",", ":"))


def read_settings(signed: Signed) -> MeshSettings:
    """What it says, whoever signed it."""
    try:
        if len(signed.text.encode()) <= SETTINGS_BYTES:
            return settings_from_document(Fields(json.loads(signed.text), "claim").get("settings"))
    except (ValueError, RecursionError, MalformedMessage):
        pass
    raise Forged("malformed settings")


def verified(signed: Signed, settings: MeshSettings, mesh: MeshId) -> OwnersSettings:
    """`Forged` where no owner of the mesh signed them."""
    signer = signer_of(signed, mesh, Claim.SETTINGS)
    if signer.role is not Role.OWNER:
        raise Forged("settings by a node that is not an owner of the mesh")
    return OwnersSettings(settings=settings, signer=signer, signed=signed)
