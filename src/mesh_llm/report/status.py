"""What `mesh-llm status` shows: documents, and nothing decided here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh_llm import __version__
from mesh_llm.engine import machine
from mesh_llm.engine.supervisor import EngineReport
from mesh_llm.engine.telemetry import Flow, Flows, pushed_bytes
from mesh_llm.host.plan_run import Run
from mesh_llm.membership.member import Member
from mesh_llm.planning.snapshot import listing
from mesh_llm.report.time_to_first_token import first_token_document
from mesh_llm.report.token_latency import token_document
from mesh_llm.report.traffic import traffic
from mesh_llm.types import MeshSettings, Mode, NodeId, Plan, Role, SpeculationCounters

if TYPE_CHECKING:
    from mesh_llm.node.node import Node


async def document(node: Node) -> dict[str, Any]:
    """The whole; plan, model and engine are the host's, wherever this node stands."""
    about = await serving(node) if node.hosting.serving is not None else await node.remote.about()
    if about is None:
        about = {
            "model": _model(node, None),
            "plan": plan_document(node.hosting.plan, epoch=_epoch(node)),
            "engine": _engine(node, node.hosting.rising),
        }
    health = node.health()
    return {
        "version": __version__,
        "node": {
            "id": node.identity.id,
            "name": node.name,
            "role": _role(node, node.identity.id),
            "state": health.state,
            "reason": health.reason,
            "resting": node.rest.on,
        },
        "mesh": {
            "id": node.entry.membership.mesh or node.identity.id,
            "nodes": [_member(node, member, about) for member in ordered(node)],
        },
        "model": about["model"],
        "plan": about["plan"],
        "engine": about["engine"],
        "api": {
            "url": node.url,
            "key_needed": node.config.api_key is not None,
            "first_token": first_token_document(node, about["plan"]),
        },
        "console": {"url": node.window.url},
    }


async def serving(node: Node) -> dict[str, Any]:
    """Plan, model and engine of the plan that this node hosts."""
    run = node.hosting.serving
    if run is not None and run.port is not None:
        run.rates.read(await run.gauge.read(*run.engine_address()))
    plan = run.plan if run is not None else node.hosting.plan
    return {
        "model": _model(node, plan),
        "plan": plan_document(_fresh(node, plan), epoch=run.epoch if run is not None else None),
        "engine": _engine(node, run),
    }


def _fresh(node: Node, plan: Plan | None) -> Plan | None:
    """The running plan, with the prediction and the reasons of the last look at it."""
    latest = node.hosting.plan
    return latest if latest is not None and plan is not None and latest.key == plan.key else plan


def _epoch(node: Node) -> int | None:
    published = node.mesh.serving()
    return published[1].epoch if published is not None else None


def ordered(node: Node) -> list[Member]:
    """As --tensor-split counts: the host, then the other nodes by id; clients, which it does not count."""
    published = node.mesh.serving()
    planned = published[0] if published is not None else node.hosting.plan and node.hosting.plan.host
    members = {member.id: member for member in node.mesh.alive()}
    listed = [members[id] for id in listing(planned or None, members)]
    return sorted(listed, key=lambda member: member.facts.role is Role.CLIENT)


def _role(node: Node, member: NodeId) -> str:
    found = node.mesh.member(member)
    published = node.mesh.serving()
    if found is not None and found.facts.role is Role.CLIENT:
        return "client"
    if published is None:
        return "standby"
    if published[0] == member:
        return "host"
    return "worker" if any(stage.node == member for stage in published[1].plan.stages) else "standby"


def _member(node: Node, member: Member, about: Mapping[str, Any]) -> dict[str, Any]:
    facts = member.facts
    link = node.mesh.paths.link_to(member.id)
    host, stages = (about["plan"] or {}).get("host"), about["engine"]["stages"]
    return {
        "id": member.id,
        "name": facts.name,
        "role": _role(node, member.id),
        "owner": facts.role is Role.OWNER,
        "state": facts.state,
        "reason": facts.reason,
        "resting": facts.resting,
        "version": facts.version,
        "standing": member.standing,
        "memory_bytes": facts.memory_bytes
        or (machine.available_memory() if member.id == node.identity.id else 0),
        "lent_bytes": _lent(node, member),
        "devices": [gpu.name for gpu in facts.gpus] or (["CPU"] if facts.role is not Role.CLIENT else []),
        "models": [model.name for model in facts.models],
        "speed": None
        if facts.speed is None
        else {
            "read_gb_s": round(facts.speed.read_bytes_per_s / 1e9, 2),
            "gflops": round(facts.speed.flops_per_s / 1e9, 1),
            "attention_gflops": round(facts.speed.attention_per_s / 1e9, 1),
        },
        "link": {
            "kind": link.kind if link is not None else node.mesh.paths.of_links(member.id),
            "rtt_ms": round(1000 * link.rtt_s, 3) if link is not None else None,
            "via": [node.mesh.name_of(other) for other in node.mesh.paths.between(member.id)],
            **traffic(node, member.id, host, stages),
        },
    }


def _lent(node: Node, member: Member) -> int:
    published = node.mesh.serving()
    if published is None:
        return 0
    return sum(stage.need_bytes for stage in published[1].plan.stages if stage.node == member.id)


def _model(node: Node, plan: Plan | None) -> dict[str, Any] | None:
    settings = node.mesh.settings() or node.entry.settings
    if settings is None:
        return None
    facts = node.model_files.facts(settings.fingerprint)
    return {
        "name": settings.alias,
        "fingerprint": settings.fingerprint,
        "size_bytes": facts.size_bytes if facts is not None else 0,
        "layers": len(facts.layers) if facts is not None else 0,
        "quantisation": facts.quantisation if facts is not None else "",
        "context": plan.context if plan is not None and plan.mode is not Mode.WAITING else None,
        "slots": plan.slots if plan is not None and plan.mode is not Mode.WAITING else None,
        "draft": _draft(node, settings),
    }


def _draft(node: Node, settings: MeshSettings) -> dict[str, Any] | None:
    """What guesses tokens ahead, and what came of it; None where nothing does.

    Without a draft model, or where the host lacks its file, only what stood in
    the text before: `name` is None then.
    """
    run = node.hosting.serving
    spec = run.supervisor.spec.draft if run is not None and run.supervisor is not None else None
    if not settings.guess or (spec is not None and spec.depth == 0):
        return None
    report = run.supervisor.report if run is not None and run.supervisor is not None else EngineReport()
    seen = report.speculation or SpeculationCounters()
    loaded = settings.draft is not None and (spec is None or spec.model is not None)
    return {
        "name": settings.draft.name if settings.draft is not None and loaded else None,
        "depth": seen.depth,
        "drafted": seen.drafted,
        "accepted": seen.accepted,
        "text_drafted": seen.text_drafted,
        "text_accepted": seen.text_accepted,
        "gain": round(seen.plain_seconds / seen.seconds, 2) if seen.drafted and seen.seconds else None,
    }


def plan_document(plan: Plan | None, *, epoch: int | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    predicted = plan.predicted
    return {
        "epoch": epoch,
        "mode": plan.mode,
        "host": plan.host,
        "need_bytes": plan.need_bytes,
        "have_bytes": plan.have_bytes,
        "predicted_tok_s": round(predicted.tok_s, 2) if predicted is not None else 0.0,
        "predicted_first_token_s": round(predicted.first_token_s, 3) if predicted is not None else None,
        "predicted_prompt_tok_s": round(predicted.prompt_tok_s, 1) if predicted is not None else None,
        "head_on_worker": plan.head_on_worker,
        "stages": [
            {
                "node": stage.node,
                "first": stage.first,
                "last": stage.last,
                "weight_bytes": stage.weight_bytes,
                "need_bytes": stage.need_bytes,
                "share": round(stage.share, 4),
            }
            for stage in plan.stages
        ],
        "excluded": [{"node": entry.node, "reason": entry.reason} for entry in plan.excluded],
        "reason": plan.reason,
    }


def _engine(node: Node, run: Run | None) -> dict[str, Any]:
    report = run.supervisor.report if run is not None and run.supervisor is not None else EngineReport()
    counters = run.counters() if run is not None else {}
    return {
        "state": report.state,
        "reason": report.reason,
        "pid": report.pid,
        "restarts": report.restarts,
        "ready_s": round(report.ready_s, 2),
        "buffers": report.buffers,
        "weights_sent_bytes": sum(stage.weight_bytes for stage in counters.values()),
        "weights_resident_bytes": _resident(node, run),
        "decode_tok_s": _decode_tok_s(node, run),
        "prompt_tok_s": round(run.rates.prompt_tok_s, 2) if run is not None else 0.0,
        "stages": [_stage(run, stage.node) for stage in run.plan.workers] if run is not None else [],
        "token": token_document(node, run) if run is not None and run.port is not None else None,
    }


def _decode_tok_s(node: Node, run: Run | None) -> float:
    """Of the last answers, or of the first one while it is under way."""
    token_s = node.window.history.token_s(run) if run is not None else None
    if run is not None and run.rates.decode_tok_s:
        return round(run.rates.decode_tok_s, 2)
    return round(1 / token_s, 2) if token_s else 0.0


def _resident(node: Node, run: Run | None) -> int:
    if run is None or run.port is None:
        return 0
    own = sum(stage.weight_bytes for stage in run.plan.stages if stage.node == node.identity.id)
    return own + sum(run.resident.values())


def _stage(run: Run, node: NodeId) -> dict[str, Any]:
    """Per token, as long as one question at a time is answered: a run is a token's, or a batch's."""
    pace, counters = run.paces().get(node), run.counters().get(node)
    flows = run.flows().get(node, Flows())
    # The last one has nobody to push to; what it has sent, and the host not read yet, is no push.
    pushed = counters if counters is not None and run.pushes.get(node) else None
    following = flows.following if pushed is not None else Flow()
    runs = pace.runs if pace is not None else 1
    return {
        "node": node,
        "link": run.link_kind(node),
        "pushes": run.pushes.get(node, True),
        "compute_ms": round(pace.compute_ns / runs / 1e6, 3) if pace is not None else 0.0,
        "wait_ms": round(pace.wait_ns / runs / 1e6, 3) if pace is not None else 0.0,
        "bytes_per_token": round((pace.sent_bytes + pace.received_bytes) / runs) if pace is not None else 0,
        "traffic": {
            "sent_bytes": counters.sent_bytes if counters is not None else 0,
            "received_bytes": counters.received_bytes if counters is not None else 0,
            "bytes_per_s": round(flows.host.bytes_per_s),
            "peak_bytes_per_s": round(flows.host.peak_bytes_per_s),
        },
        "pushed": {
            "sent_bytes": pushed_bytes(pushed) if pushed is not None else 0,
            "received_bytes": 0,
            "bytes_per_s": round(following.bytes_per_s),
            "peak_bytes_per_s": round(following.peak_bytes_per_s),
        },
    }
