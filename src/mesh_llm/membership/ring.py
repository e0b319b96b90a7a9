"""Whom to stay connected to when a mesh is too large for everybody.

Ids are public keys, so their order is as good as chance: every node keeps its neighbours on either
side in that order, and a few chords to fixed points of the circle. What a node chooses moves only
when a node appears or goes right there, not with every change of the mesh.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from mesh_llm.types import NodeId

MEMBER_SMALL = 16
"""Up to so many members all keep connections to all; beyond it, to ring neighbours and chords."""
MEMBER_NEIGHBOURS = 2
"""On either side of the ring: it stays whole when any one of them dies."""
MEMBER_CHORDS = 2
"""Connections across the ring, per node: a thousand nodes are six hops wide instead of 250."""


def chosen(me: NodeId, ring: Sequence[NodeId]) -> frozenset[NodeId]:
    """Of `ring` (sorted, myself included) those to be connected to."""
    if len(ring) <= MEMBER_SMALL:
        return frozenset(ring) - {me}
    at, count = bisect_left(ring, me), len(ring)
    near = {ring[(at + step) % count] for step in range(-MEMBER_NEIGHBOURS, MEMBER_NEIGHBOURS + 1)}
    far = {ring[bisect_left(ring, _point(me, chord)) % count] for chord in range(MEMBER_CHORDS)}
    return frozenset(near | far) - {me}


def _point(me: NodeId, chord: int) -> NodeId:
    return NodeId(hashlib.blake2b(f"{me} {chord}".encode(), digest_size=32).hexdigest())
