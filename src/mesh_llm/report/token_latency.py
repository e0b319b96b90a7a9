"""Where the time of the running plan's tokens goes, as its host can tell."""

from __future__ import annotations

from collections import defaultdict

from mesh_llm.host.plan_run import PlanRun
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
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import TokenPartStatus, TokenStatus
from mesh_llm.types import NodeId, Plan

_F32_BYTES = 4


def token_status(view: NodeView, run: PlanRun) -> TokenStatus:
    """`engine.token` of the status; without parts while nothing is measured."""
    measured = _measured(view, run)
    if measured is None or run.plan.host is None:
        return TokenStatus(total_ms=0.0, parts=(), sentence=NOTHING_MEASURED)
    token = token_time(measured, host=run.plan.host)
    text = sentence(
        token,
        host=run.plan.host,
        name=view.mesh.name_of,
        shares=_shares(run.plan),
        drafts=measured.tokens_per_pass > 1,
    )
    parts = (TokenPartStatus(kind=part.kind, node=part.node, ms=part.us / 1000) for part in token.parts)
    return TokenStatus(total_ms=token.total_us / 1000, parts=tuple(parts), sentence=text)


def _shares(plan: Plan) -> dict[NodeId, float]:
    shares: defaultdict[NodeId, float] = defaultdict(float)
    for stage in plan.stages:
        shares[stage.node] += stage.share
    return shares


def _measured(view: NodeView, run: PlanRun) -> Measured | None:
    token_s = view.token_s(run)
    facts = view.model_files.facts(run.settings.fingerprint)
    paces = run.paces()
    workers = [stage.place for stage in run.plan.workers]
    if token_s is None or facts is None or any(not (p := paces.get(w)) or not p.runs for w in workers):
        return None
    computing: defaultdict[NodeId, float] = defaultdict(float)
    for worker in workers:
        computing[worker.node] += paces[worker].compute_ns / paces[worker].runs / 1e9
    # The last device of each node: hops within it are no link.
    last = {worker.node: worker for worker in workers}
    snapshot = view.mesh.snapshot()

    def hop_s(a: NodeId, b: NodeId) -> float:
        way = way_of(snapshot.link(a, b))
        return way.delay_s + way.overhead_s + _F32_BYTES * facts.hidden / way.bytes_per_s

    drafts, own = run.speculation, view.mesh.facts
    speed = own.speed and shared(own.speed, own.cores, view.mesh.own_machine.nodes())
    return Measured(
        token_s=token_s,
        tokens_per_pass=drafts.tokens / drafts.steps if drafts is not None and drafts.steps else 1.0,
        workers_s=computing,
        links_s=links_seconds(
            view.id, tuple(computing), pushes=lambda node: run.pushes.get(last[node], True), hop_s=hop_s
        ),
        host_s=host_seconds(facts, run.plan, speed),
    )
