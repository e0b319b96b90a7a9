"""What `mesh-llm status` shows: the schema, filled in; nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_llm import __version__
from mesh_llm.engine import machine
from mesh_llm.engine.spec import DraftSpec
from mesh_llm.engine.supervisor import EngineReport
from mesh_llm.engine.telemetry import Flow, Flows, pushed_bytes
from mesh_llm.host.lane import Lane
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.membership.member import Member
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.experience import Experience, corrected
from mesh_llm.planning.predict import MEASURED_WITHIN
from mesh_llm.planning.snapshot import listing
from mesh_llm.planning.speculation import draft_off
from mesh_llm.report.key_status import key_statuses
from mesh_llm.report.time_to_first_token import first_token_status
from mesh_llm.report.token_latency import token_status
from mesh_llm.report.traffic import traffic
from mesh_llm.report.view import ModelView, NodeView
from mesh_llm.status_schema import (
    ApiStatus,
    ConsoleStatus,
    DraftStatus,
    EngineStageStatus,
    EngineStatus,
    ExcludedStatus,
    LaneStatus,
    LinkStatus,
    MemberStatus,
    MeshStatus,
    ModelStatus,
    NodeStatus,
    PlanStageStatus,
    PlanStatus,
    ReplicaStatus,
    ServedModelStatus,
    ServingStatus,
    SpeedStatus,
    Status,
    Traffic,
)
from mesh_llm.types import (
    Fingerprint,
    HostingMode,
    Mode,
    NodeFacts,
    NodeId,
    Place,
    Plan,
    Prediction,
    Role,
    SpeculationCounters,
    Speed,
)


async def status(view: NodeView) -> Status:
    """The whole; plan, model and engine are the host's, wherever this node stands."""
    about = await _about(view, view.models()[0])
    health = view.health()
    return Status(
        version=__version__,
        node=NodeStatus(
            id=view.id,
            name=view.name,
            role=_role(view, view.id),
            state=health.state,
            reason=health.reason,
            resting=view.mesh.facts.resting,
            paused=view.mesh.facts.paused,
            lend=view.config.lend.text,
        ),
        mesh=MeshStatus(
            id=view.mesh_id() or view.id,
            nodes=tuple(_member(view, member, about) for member in ordered(view)),
        ),
        model=about.model,
        plan=about.plan,
        engine=about.engine,
        api=ApiStatus(
            url=view.api_url(),
            key_needed=view.config.api_key is not None,
            first_token=first_token_status(view, about.plan),
            keys=key_statuses(view.key_reports()),
            shared_url=view.shared_url(),
        ),
        console=ConsoleStatus(url=view.console_url()),
        models=tuple(_served(model) for model in view.models()),
    )


def _served(model: ModelView) -> ServedModelStatus:
    settings, health, published = model.settings(), model.health(), model.plans.serving()
    plan = published[1].plan if published is not None else None
    return ServedModelStatus(
        name=health.model or "",
        fingerprint=settings.fingerprint if settings is not None else "",
        default=model.plans.is_default,
        state=health.state,
        reason=health.reason or (_why(plan) if plan is not None and plan.moved else ""),
        host=published[0] if published is not None else None,
        mode=plan.mode if plan is not None else None,
        context=plan.context if plan is not None else None,
        slots=plan.slots if plan is not None else None,
        nodes=_nodes(plan) if plan is not None else (),
        replicas=tuple(
            ReplicaStatus(
                host=host,
                mode=serving.plan.mode,
                nodes=_nodes(serving.plan),
                crowded=model.plans.is_crowded_at(host, serving),
                lanes=serving.plan.lanes,
            )
            for host, serving in model.plans.replicas().values()
        ),
        replicas_wanted=model.plans.wanted(),
        replicas_least=settings.least_replicas if settings is not None else 1,
        replicas_most=settings.most_replicas if settings is not None else 1,
        on_demand=settings is not None and settings.on_demand,
        priority=settings.rank if settings is not None else 0,
        draft=_draft(model, settings) if settings is not None else None,
        adapters=_adapters(settings) if settings is not None else (),
    )


def _why(plan: Plan) -> str:
    """The reason, and of a plan that took another one's place what moved and at what price."""
    return f"{plan.reason}; {plan.moved}" if plan.moved else plan.reason


def _nodes(plan: Plan) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys(stage.node for stage in plan.stages))


async def _about(view: NodeView, model: ModelView) -> ServingStatus:
    """Of one model."""
    if model.hosting.serving is not None:
        return await serving(view, model)
    return await model.remote_engine.about() or ServingStatus(
        model=_model(view, model, None),
        plan=plan_status(model.hosting.plan, epoch=_epoch(model), seen=_seen(view, model.hosting.plan)),
        engine=_engine(view, model.hosting.starting),
    )


async def serving(view: NodeView, model: ModelView) -> ServingStatus:
    """Plan, model and engine of the plan that this node hosts."""
    run = model.hosting.serving
    if run is not None and run.port is not None:
        run.rates.read((await run.lanes.measure())[0])
    plan = run.plan if run is not None else model.hosting.plan
    fresh = _fresh(model, plan)
    return ServingStatus(
        model=_model(view, model, plan),
        plan=plan_status(fresh, epoch=run.epoch if run is not None else None, seen=_seen(view, fresh)),
        engine=_engine(view, run),
    )


def _fresh(model: ModelView, plan: Plan | None) -> Plan | None:
    """The running plan, with the prediction and the reasons of the last look at it."""
    latest = model.hosting.plan
    return latest if latest is not None and plan is not None and latest.key == plan.key else plan


def _seen(view: NodeView, plan: Plan | None) -> Experience:
    return view.experience_before(plan) if plan is not None else Experience()


def _epoch(model: ModelView) -> int | None:
    published = model.plans.serving()
    return published[1].epoch if published is not None else None


def ordered(view: NodeView) -> list[Member]:
    """As --tensor-split counts: the host, then the other nodes by id; clients, which it does not count."""
    published = view.mesh.serving()
    planned = published[0] if published is not None else view.hosting.plan and view.hosting.plan.host
    members = {member.id: member for member in view.mesh.alive()}
    listed = [members[id] for id in listing(planned or None, members)]
    return sorted(listed, key=lambda member: member.facts.role is Role.CLIENT)


def _before_it_is_told(view: NodeView, member: Member) -> int:
    """What this node will lend, until it has been measured; a lite client lends nothing."""
    if member.id != view.id or member.facts.role is Role.CLIENT:
        return 0
    return machine.available_memory()


def _role(view: NodeView, member: NodeId) -> str:
    """By the plans of all models: one that hosts any of them is a host."""
    found = view.mesh.member(member)
    if found is not None and found.facts.role is Role.CLIENT:
        return "client"
    plans = _plans(view)
    if any(plan.host == member for plan in plans):
        return "host"
    worked = any(stage.node == member for plan in plans for stage in plan.stages)
    return "worker" if worked else "standby"


def _plans(view: NodeView) -> list[Plan]:
    """That serve, of all models."""
    return [serving.plan for _, serving in view.mesh.all_serving()]


def _member(view: NodeView, member: Member, about: ServingStatus) -> MemberStatus:
    facts = member.facts
    return MemberStatus(
        id=member.id,
        name=facts.name,
        role=_role(view, member.id),
        owner=facts.role is Role.OWNER,
        state=facts.state,
        reason=facts.reason,
        resting=facts.resting,
        paused=facts.paused,
        version=facts.version,
        standing=member.standing,
        memory_bytes=facts.memory_bytes or _before_it_is_told(view, member),
        lent_bytes=_lent(view, member),
        devices=_devices(facts),
        models=tuple(model.name for model in facts.models if model.fingerprint not in _side_files(view)),
        lacks=_lacks(view, facts),
        speed=_speed(facts.speed),
        link=_link(view, member.id, about),
    )


def _side_files(view: NodeView) -> dict[Fingerprint, str]:
    """Names of the files that go with the models."""
    settings = view.mesh.settings()
    models = settings.models if settings is not None else ()
    return {Fingerprint(file.digest): file.name for model in models for file in model.side_files}


def _lacks(view: NodeView, facts: NodeFacts) -> tuple[str, ...]:
    settings = view.mesh.settings()
    if settings is None or facts.role is Role.CLIENT:
        return ()
    held = {model.fingerprint for model in facts.models}
    lacks: dict[str, str] = {}
    for model in settings.models:
        hosts = model.fingerprint in held and facts.hosting is not HostingMode.NEVER
        needed = model.side_files if hosts else [adapter.file for adapter in model.adapters]
        lacks |= {file.digest: file.name for file in needed if file.digest not in held}
    return tuple(lacks.values())


def _devices(facts: NodeFacts) -> tuple[str, ...]:
    named = tuple(device.name for device in facts.devices or facts.gpus)
    return named or (("CPU",) if facts.role is not Role.CLIENT else ())


def _speed(speed: Speed | None) -> SpeedStatus | None:
    if speed is None:
        return None
    return SpeedStatus(
        read_gb_s=round(speed.read_bytes_per_s / 1e9, 2),
        gflops=round(speed.flops_per_s / 1e9, 1),
        attention_gflops=round(speed.attention_per_s / 1e9, 1),
    )


def _link(view: NodeView, member: NodeId, about: ServingStatus) -> LinkStatus:
    paths = view.mesh.paths
    link = paths.link_to(member)
    host = about.plan.host if about.plan is not None else None
    crossed = traffic(view, member, host, about.engine.stages)
    return LinkStatus(
        kind=link.kind if link is not None else paths.of_links(member),
        rtt_ms=round(1000 * link.rtt_s, 3) if link is not None else None,
        via=tuple(view.mesh.name_of(other) for other in paths.between(member)),
        remote=paths.remote(member),
        sent_bytes=crossed.sent_bytes,
        received_bytes=crossed.received_bytes,
        bytes_per_s=crossed.bytes_per_s,
        peak_bytes_per_s=crossed.peak_bytes_per_s,
    )


def _lent(view: NodeView, member: Member) -> int:
    stages = (stage for plan in _plans(view) for stage in plan.stages)
    return sum(stage.need_bytes for stage in stages if stage.node == member.id)


def _model(view: NodeView, model: ModelView, plan: Plan | None) -> ModelStatus | None:
    settings = model.settings()
    if settings is None:
        return None
    facts = view.model_files.facts(settings.fingerprint)
    loaded = plan is not None and plan.mode is not Mode.WAITING
    return ModelStatus(
        name=settings.alias,
        fingerprint=settings.fingerprint,
        size_bytes=facts.size_bytes if facts is not None else 0,
        layers=len(facts.layers) if facts is not None else 0,
        quantisation=facts.quantisation if facts is not None else "",
        context=plan.context if plan is not None and loaded else None,
        slots=plan.slots if plan is not None and loaded else None,
        draft=_draft(model, settings),
        adapters=_adapters(settings),
    )


def _adapters(settings: ModelSettings) -> tuple[str, ...]:
    return tuple(each.file.name for each in settings.adapters)


def _draft(model: ModelView, settings: ModelSettings) -> DraftStatus | None:
    """What guesses tokens ahead, and what came of it; None where nothing does."""
    run = model.hosting.serving
    spec = run.supervisor.spec.draft if run is not None and run.supervisor is not None else None
    if not settings.guess or (spec is not None and spec.depth == 0):
        return None
    report = run.supervisor.report if run is not None and run.supervisor is not None else EngineReport()
    seen = report.speculation or SpeculationCounters()
    return DraftStatus(
        name=_drafter(settings, spec),
        depth=seen.depth,
        drafted=seen.drafted,
        accepted=seen.accepted,
        text_drafted=seen.text_drafted,
        text_accepted=seen.text_accepted,
        gain=round(seen.plain_seconds / seen.seconds, 2) if seen.drafted and seen.seconds else None,
        off=draft_off(run.plan, settings) if run is not None else None,
    )


def _drafter(settings: ModelSettings, spec: DraftSpec | None) -> str | None:
    if spec is not None and spec.head_depth > 0:
        return "its MTP head"
    loaded = settings.draft is not None and (spec is None or spec.model is not None)
    return settings.draft.name if settings.draft is not None and loaded else None


_NOTHING = Experience()


def plan_status(plan: Plan | None, *, epoch: int | None, seen: Experience = _NOTHING) -> PlanStatus | None:
    """`seen`: what the same plan has shown here before."""
    if plan is None:
        return None
    predicted = corrected(plan.predicted, seen) if plan.predicted is not None else None
    slow, fast = predicted.tok_s_range if predicted is not None else (None, None)
    early, late = predicted.first_token_range if predicted is not None else (None, None)
    return PlanStatus(
        epoch=epoch,
        mode=plan.mode,
        host=plan.host,
        need_bytes=plan.need_bytes,
        have_bytes=plan.have_bytes,
        predicted_tok_s=round(predicted.tok_s, 2) if predicted is not None else 0.0,
        predicted_first_token_s=round(predicted.first_token_s, 3) if predicted is not None else None,
        predicted_prompt_tok_s=round(predicted.prompt_tok_s, 1) if predicted is not None else None,
        head_on_worker=plan.head_on_worker,
        stages=tuple(
            PlanStageStatus(
                node=stage.node,
                first=stage.first,
                last=stage.last,
                weight_bytes=stage.weight_bytes,
                need_bytes=stage.need_bytes,
                share=round(stage.share, 4),
                device=stage.device or None,
            )
            for stage in plan.stages
        ),
        excluded=tuple(ExcludedStatus(node=left.node, reason=left.reason) for left in plan.excluded),
        reason=_why(plan),
        predicted_tok_s_low=round(slow, 2) if slow is not None else None,
        predicted_tok_s_high=round(fast, 2) if fast is not None else None,
        predicted_first_token_low_s=round(early, 3) if early is not None else None,
        predicted_first_token_high_s=round(late, 3) if late is not None else None,
        predicted_from=_predicted_from(predicted, seen),
        lanes=plan.lanes,
        lanes_reason=plan.lanes_reason,
    )


def _predicted_from(predicted: Prediction | None, seen: Experience) -> str | None:
    if predicted is None:
        return None
    if seen.token:
        return "this plan"
    return "the model's types" if predicted.tok_s_within <= MEASURED_WITHIN else "a usual model"


def _engine(view: NodeView, run: PlanRun | None) -> EngineStatus:
    report = run.supervisor.report if run is not None and run.supervisor is not None else EngineReport()
    counters = run.counters() if run is not None else {}
    return EngineStatus(
        state=report.state,
        reason=report.reason,
        pid=report.pid,
        restarts=report.restarts,
        ready_s=round(report.ready_s, 2),
        buffers=report.buffers,
        weights_sent_bytes=sum(stage.weight_bytes for stage in counters.values()),
        weights_resident_bytes=_resident(view, run),
        decode_tok_s=_decode_tok_s(view, run),
        prompt_tok_s=round(run.rates.prompt_tok_s, 2) if run is not None else 0.0,
        stages=tuple(_stage(run, stage.place) for stage in run.plan.workers) if run is not None else (),
        token=token_status(view, run) if run is not None and run.port is not None else None,
        warnings=(*run.warnings, *_builders(view, run.plan)) if run is not None else (),
        lanes=tuple(_lane(run, lane) for lane in run.lanes.all) if run is not None else (),
    )


def _lane(run: PlanRun, lane: Lane) -> LaneStatus:
    return LaneStatus(
        number=lane.number,
        state=lane.report.state,
        pid=lane.report.pid,
        requests=run.lanes.turns.taken(lane.url),
        ends=lane.ends,
    )


def _builders(view: NodeView, plan: Plan) -> Iterator[str]:
    """A sentence for each node of a plan that is quicker soon."""
    for node in dict.fromkeys(stage.node for stage in plan.stages):
        if (member := view.mesh.member(node)) is not None and member.facts.builds:
            yield (
                f"{member.facts.name} computes with the engine's own CPU code while a library for its "
                "processor is being built; it will be quicker afterwards"
            )


def _decode_tok_s(view: NodeView, run: PlanRun | None) -> float:
    """Of the last answers, or of the first one while it is under way."""
    token_s = view.token_s(run) if run is not None else None
    if run is not None and run.rates.decode_tok_s:
        return round(run.rates.decode_tok_s, 2)
    return round(1 / token_s, 2) if token_s else 0.0


def _resident(view: NodeView, run: PlanRun | None) -> int:
    if run is None or run.port is None:
        return 0
    own = sum(stage.weight_bytes for stage in run.plan.stages if stage.node == view.id)
    return own + run.resident_bytes


def _stage(run: PlanRun, place: Place) -> EngineStageStatus:
    """A run is a token's, or a batch's."""
    pace, counters = run.paces().get(place), run.counters().get(place)
    flows = run.flows().get(place, Flows())
    # The last one has nobody to push to; what it has sent, and the host not read yet, is no push.
    pushed = counters if counters is not None and run.pushes.get(place) else None
    following = flows.following if pushed is not None else Flow()
    runs = pace.runs if pace is not None else 1
    return EngineStageStatus(
        node=place.node,
        device=place.device or None,
        link=run.link_kind(place),
        pushes=run.pushes.get(place, True),
        compute_ms=round(pace.compute_ns / runs / 1e6, 3) if pace is not None else 0.0,
        wait_ms=round(pace.wait_ns / runs / 1e6, 3) if pace is not None else 0.0,
        bytes_per_token=round((pace.sent_bytes + pace.received_bytes) / runs) if pace is not None else 0,
        traffic=Traffic(
            sent_bytes=counters.sent_bytes if counters is not None else 0,
            received_bytes=counters.received_bytes if counters is not None else 0,
            bytes_per_s=round(flows.host.bytes_per_s),
            peak_bytes_per_s=round(flows.host.peak_bytes_per_s),
        ),
        pushed=Traffic(
            sent_bytes=pushed_bytes(pushed) if pushed is not None else 0,
            bytes_per_s=round(following.bytes_per_s),
            peak_bytes_per_s=round(following.peak_bytes_per_s),
        ),
    )
