"""Homes that an earlier version wrote, in the form of this one.

0.1 kept everything unsigned. Its identity, mesh, credential and invites are taken over as they are. What the
home claimed itself is signed now: its settings, if it created the mesh, and the invites that it revoked. What
others claimed is asked for again; where they were is tried. That it was expelled was a peer's word alone: it
is not taken over.
"""

from __future__ import annotations

import time
from typing import Any

from mesh_llm.membership.settings_documents import settings_from_document
from mesh_llm.transport.credential import Grant
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.revocations import Revocations
from mesh_llm.types import MeshId, NodeId, Role

HOME_VERSION = 2


def current(document: dict[str, Any], identity: Identity) -> dict[str, Any]:
    """The document as this version writes it; raises as a damaged one does."""
    if "version" in document:
        return document
    old = document["membership"]
    invites = [{**invite, "limit": None, "nodes": []} for invite in old["invites"]]
    membership = Membership(
        mesh=MeshId(old["mesh"]),
        credential=tuple(_grant(entry) for entry in old["credential"]),
        revocations=Revocations(MeshId(old["mesh"])),
    )
    for invite in invites:
        if invite["revoked"] and membership.revocations.has_room(identity.id, membership.credential):
            membership.revoke(invite["id"], identity)
    if document["settings"] is not None and old["mesh"] == identity.id:
        membership.set(settings_from_document(document["settings"]), identity, now=time.time())
    return {
        "version": HOME_VERSION,
        "membership": {**membership.to_document(), "invites": invites},
        "members": [],
        "hints": document["members"],
        "epoch": document.get("epoch", 0),
        "ports": document.get("ports", (0, 0)),
        "relay": document["relay"],
        "relay_token": document["relay_token"],
    }


def _grant(entry: dict[str, str]) -> Grant:
    return Grant(
        node=NodeId(entry["node"]),
        role=Role(entry["role"]),
        invite=entry["invite"],
        signature=bytes.fromhex(entry["signature"]),
    )
