"""Where the time of the running plan's tokens goes, as its host can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_llm.planning.plan_inputs import way_of
from mesh_llm.planning.shared_machines import shared
from mesh_llm.planning.token_time import (
    NOTHING_MEASURED,
    Measured,
    host_seconds,
    links_seconds,
    sentence,
    token_time,
)
from mesh_llm.types import NodeId

if TYPE_CHECKING:
    from mesh_llm.host.plan_run import Run
    from mesh_llm.node.node import Node

_F32_BYTES = 4


def token_document(node: Node, run: Run) -> dict[str, Any]:
    """`engine.token` of the status; without parts while nothing is measured."""
    measured = _measured(node, run)
    if measured is None or run.plan.host is None:
        return {"total_ms": 0.0, "parts": [], "sentence": NOTHING_MEASURED}
    token = token_time(measured, host=run.plan.host)
    text = sentence(
        token,
        host=run.plan.host,
        name=node.mesh.name_of,
        shares={stage.node: stage.share for stage in run.plan.stages},
        drafts=measured.tokens_per_pass > 1,
    )
    return {
        "total_ms": token.total_us / 1000,
        "parts": [{"kind": part.kind, "node": part.node, "ms": part.us / 1000} for part in token.parts],
        "sentence": text,
    }


def _measured(node: Node, run: Run) -> Measured | None:
    token_s = node.window.history.token_s(run)
    facts = node.model_files.facts(run.settings.fingerprint)
    paces = run.paces()
    workers = [stage.node for stage in run.plan.workers]
    if token_s is None or facts is None or any(not (p := paces.get(w)) or not p.runs for w in workers):
        return None
    snapshot = node.mesh.snapshot()

    def hop_s(a: NodeId, b: NodeId) -> float:
        way = way_of(snapshot.link(a, b))
        return way.delay_s + way.overhead_s + _F32_BYTES * facts.hidden / way.bytes_per_s

    drafts, own = run.speculation, node.mesh.facts
    speed = own.speed and shared(own.speed, own.cores, node.mesh.nodes_here())
    return Measured(
        token_s=token_s,
        tokens_per_pass=drafts.tokens / drafts.steps if drafts is not None and drafts.steps else 1.0,
        workers_s={worker: paces[worker].compute_ns / paces[worker].runs / 1e9 for worker in workers},
        links_s=links_seconds(
            node.identity.id, workers, pushes=lambda worker: run.pushes.get(worker, True), hop_s=hop_s
        ),
        host_s=host_seconds(facts, run.plan, speed),
    )
