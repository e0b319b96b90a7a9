"""A document of each kind, as if from an honest node: what mutations begin with."""

from __future__ import annotations

from typing import Any

from mesh_llm.types import NodeId
from tests.hostile.adversary import Adversary


def messages(bad: Adversary, theirs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A message of each kind, to be `sealed`; those about others say what hurts the node of `theirs`."""
    bad.incarnation += 1
    other, incarnation, sequence = theirs["id"], theirs["i"], theirs["s"]
    own = bad.numbers(bad.id)
    facts = _all_facts(bad, other)
    mine = own | {"claim": "record", "text": own | {"facts": facts}}
    left = own | {"is": "left", "claim": "record", "text": own | {"facts": facts, "left": True}}
    dead = bad.hint(other, "dead", incarnation=incarnation, sequence=sequence)
    entries = [[bad.id, bad.incarnation, "alive", 1], [other, incarnation, "dead", sequence]]
    settings = {"claim": "settings", "text": {"settings": bad.settings_of_creator()}}
    revoked = {"claim": "revocation", "text": {"revoke": f"{bad.incarnation % 97:016x}"}}
    # Settings are refused before a revocation is looked at.
    both = bad.incarnation % 2 == 0
    return {
        "ping": bad.ping(7),
        "ack": bad.ack({"n": 7, "d": 1}) | {"ask": True},
        "hears": {"kind": "hears", "nodes": [other]},
        "update": bad.update(mine, dead, theirs),
        "compare": {"kind": "compare", "buckets": [[0, 1], [5, 77]]},
        "summary": {"kind": "summary", "buckets": [0, 5], "entries": entries},
        "want": {"kind": "want", "nodes": [bad.id, other]},
        "leave": {"kind": "leave", "record": left},
        "claims": bad.claims(settings=[settings] if both else [], revocations=[revoked]),
        "promotion": bad.promotion(bad.credential),
        "guest": bad.guest(),
    }


def _all_facts(bad: Adversary, other: NodeId) -> dict[str, Any]:
    gpu = {"name": "g", "description": "d", "kind": "gpu", "free_bytes": 1, "total_bytes": 2}
    return bad.facts(
        memory_bytes=1,
        cores=1,
        gpus=[gpu],
        models=[{"fingerprint": "ab", "name": "other", "size_bytes": 1}],
        part={"fingerprint": "ab", "spans": [[0, 2]]},
        links=[{"node": other, "kind": "quic", "rtt_s": 0.001}],
        speed={"read": 1.0, "flops": 1.0, "attention": 1.0},
        # Another one's, and an old one: it may say that it hosts itself, and others would follow it.
        serving=bad.serving(epoch=0, layers=1, host=other),
    )


def streams(bad: Adversary, other: NodeId, *, epoch: int, fingerprint: str) -> dict[str, dict[str, Any]]:
    """The first document of a stream of each kind."""
    session = {"kind": "session", "epoch": epoch}
    headers: dict[str, dict[str, Any]] = {
        "http": bad.to_http(epoch) | {"name": "n", "resumed": False, "within_s": 1.0},
        "serving": bad.to_serving(epoch) | {"samples_since": 0.0},
        "introduce": {"epoch": epoch, "number": 1, "next": other},
        "lease": bad.to_lease(fingerprint, epoch=epoch),
        "link": {"way": "quic", "purpose": session, "ticket": "00" * 32},
        "file": bad.to_bytes(fingerprint, size_bytes=1) | {"ask": "ranges", "ranges": [[0, 1]]},
    }
    headers |= {"forward": {"to": other}, "forwarded": {}}
    return {kind: {"kind": kind, "header": header} for kind, header in headers.items()}
