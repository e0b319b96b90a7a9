"""The node's series in `/metrics`: what it knows anyway, written down when somebody asks.

Nothing is measured for it, and nothing counted that the parts do not count for
themselves. Labels stay few in however large a mesh: members are counted by
state, and only stages of the serving plan and direct peers have series of
their own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mesh_llm import __version__
from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.engine.telemetry import figures_in
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.membership.member import Member, Standing, serving_among
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.report.metric_families import gauge, labelled, one_of, summed
from mesh_llm.report.process_usage import usage
from mesh_llm.report.view import ModelView, NodeView
from mesh_llm.types import (
    Mode,
    NodeId,
    Place,
    Plan,
    Progress,
    Role,
    SpeculationCounters,
    Stage,
    StageCounters,
    State,
)

_PEERS_SHOWN = 64
"""More than a node keeps connections to other nodes; lite clients of one host may be more."""
_STAGES_SHOWN = 64
_ID_SHOWN = 16
"""Names may be the same, and so may short ids where somebody takes pains; equal series break a scrape."""
_PROGRESS_KEPT_S = 60.0
"""What has not moved for so long was given up, or says nothing any more."""
_NS = 1e-9

PEER = ("peer", "id")
STAGE = ("stage", "node", "id")


class PlanRole(StrEnum):
    """What a node has to do with the plan that serves."""

    HOST = "host"
    WORKER = "worker"
    STANDBY = "standby"
    CLIENT = "client"


class NodeMetrics(Collector):
    def __init__(self, view: NodeView) -> None:
        self._view = view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._step: tuple[float, Progress] | None = None
        self._engine_starts = 0
        self._engine_deaths = 0

    # -- what is told to it --------------------------------------------------------------------

    def progress(self, step: Progress) -> None:
        self._step = (time.monotonic(), step)

    def on_engine(self, report: EngineReport) -> None:
        """Every report of every engine; plans may follow each other with an engine each."""
        match report.state:
            case EngineState.LOADING if report.pid is None:
                self._engine_starts += 1
            case EngineState.FAILED:
                self._engine_deaths += 1

    # -- what it tells -------------------------------------------------------------------------

    def text(self, engine: bytes) -> bytes:
        """All series. `engine`: the text of the engine that this node's API leads to."""
        run = self._view.hosting.serving
        if run is not None and run.port is not None and run.broken is None:
            run.rates.read(figures_in(engine.decode("utf-8", "replace")))
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        # Looked at once: this is most of the work in a large mesh.
        members = self._view.mesh.members
        published = next(iter(serving_among(members, self._view.mesh.settings()).values()), None)
        host, plan, epoch = (
            (published[0], published[1].plan, published[1].epoch) if published else (None, None, 0)
        )
        yield from self._about(host, plan)
        yield from _members(members)
        yield from self._models()
        yield from self._plan(plan, epoch)
        yield from self._stages(plan)
        yield from self._links(members, plan)
        yield from self._engine()
        yield from self._lanes()
        yield from self._memory()
        yield from self._processes()
        yield from self._counts()
        yield from self._progress()

    def _about(self, host: NodeId | None, plan: Plan | None) -> Iterator[Metric]:
        view = self._view
        yield labelled(
            "mesh_llm_node_info",
            "This node, with the versions of mesh-llm and of the engine; always 1.",
            ("name", "id", "version", "engine"),
            [((view.name, view.id[:_ID_SHOWN], __version__, view.mesh.facts.engine), 1)],
        )
        yield one_of(
            "mesh_llm_node_state",
            "The state of this node: 1 for the current one.",
            State,
            view.health().state,
        )
        part = PlanRole.STANDBY
        if view.config.client:
            part = PlanRole.CLIENT
        elif host == view.id:
            part = PlanRole.HOST
        elif plan is not None and any(stage.node == view.id for stage in plan.stages):
            part = PlanRole.WORKER
        yield one_of(
            "mesh_llm_node_role",
            "This node's part in the serving plan: 1 for the current one.",
            PlanRole,
            part,
        )

    def _models(self) -> Iterator[Metric]:
        """All that the mesh serves, whoever hosts them; at most `MODELS_LIMIT`."""
        models = [(view, view.health()) for view in self._view.models()]
        yield labelled(
            "mesh_llm_model_serving",
            "Whether this node's API answers with the model: 1 if it does.",
            ("model",),
            [((health.model or "",), float(health.state is State.SERVING)) for _, health in models],
        )
        yield labelled(
            "mesh_llm_model_replicas",
            "How often the model runs in the mesh.",
            ("model",),
            [((health.model or "",), float(len(view.plans.replicas()))) for view, health in models],
        )
        yield labelled(
            "mesh_llm_model_replicas_wanted",
            "How often it is to run, by what owners have set and by the requests that wait.",
            ("model",),
            [((health.model or "",), float(view.plans.wanted())) for view, health in models],
        )
        yield labelled(
            "mesh_llm_model_lanes",
            "Engines that answer with the model in the mesh, by the plans of all its replicas.",
            ("model",),
            [((health.model or "",), float(_planned_lanes(view))) for view, health in models],
        )
        yield labelled(
            "mesh_llm_model_queue_waiting",
            "Requests that wait for a slot of the model's engine on this node.",
            ("model",),
            [((health.model or "",), float(view.slot_queue.waiting)) for view, health in models],
        )

    def _plan(self, serving: Plan | None, epoch: int) -> Iterator[Metric]:
        wanted = self._view.hosting.plan
        plan = serving if serving is not None else wanted
        # The prediction of the last look at it, where this node is the one that looks.
        fresh = wanted if wanted is not None and plan is not None and wanted.key == plan.key else plan
        yield gauge(
            "mesh_llm_plan_epoch", "Epoch of the plan that serves the mesh; 0 while none does.", epoch
        )
        yield one_of(
            "mesh_llm_plan_mode",
            "The mode of the plan that serves, or that waits for memory: 1 for the current one.",
            Mode,
            plan.mode if plan is not None else None,
        )
        if plan is None or fresh is None:
            return
        yield gauge(
            "mesh_llm_plan_need_bytes", "Memory that the plan needs, on all its nodes.", plan.need_bytes
        )
        yield gauge("mesh_llm_plan_have_bytes", "Memory that the mesh has for the plan.", plan.have_bytes)
        yield gauge(
            "mesh_llm_plan_left_out_nodes", "Members without a part in the plan.", len(fresh.excluded)
        )
        if fresh.predicted is not None:
            yield gauge(
                "mesh_llm_plan_predicted_tokens_per_second",
                "Predicted decoding speed, for one request at a time.",
                fresh.predicted.tok_s,
            )
            yield gauge(
                "mesh_llm_plan_predicted_first_token_seconds",
                "Predicted time to first token, for a prompt of 512 tokens.",
                fresh.predicted.first_token_s,
            )

    def _stages(self, plan: Plan | None) -> Iterator[Metric]:
        stages = plan.stages[:_STAGES_SHOWN] if plan is not None else ()
        labels = {stage: self._stage_labels(index, stage) for index, stage in enumerate(stages)}

        def each(name: str, text: str, figures: Mapping[Stage, float]) -> Metric:
            return labelled(name, text, STAGE, [(labels[stage], value) for stage, value in figures.items()])

        yield each(
            "mesh_llm_stage_layers", "Number of layers of a stage.", {s: s.last - s.first for s in stages}
        )
        yield each("mesh_llm_stage_first_layer", "First layer of a stage.", {s: s.first for s in stages})
        yield each(
            "mesh_llm_stage_share_ratio", "Share of the model that a stage has.", {s: s.share for s in stages}
        )
        yield each(
            "mesh_llm_stage_weight_bytes", "Size of a stage's weights.", {s: s.weight_bytes for s in stages}
        )
        yield each(
            "mesh_llm_stage_need_bytes",
            "Memory that the stage needs, cache and scratch included.",
            {s: s.need_bytes for s in stages},
        )
        run = self._view.hosting.serving
        if run is not None:
            # An old plan's engine may still run while another one is published.
            known = [(labels[stage], stage.place) for stage in stages if stage in run.plan.workers]
            yield from _work(known, run.counters())
            yield from _pace(known, run.paces())

    def _stage_labels(self, index: int, stage: Stage) -> tuple[str, ...]:
        return (str(index), self._view.mesh.name_of(stage.node), stage.node[:_ID_SHOWN])

    def _links(self, members: Sequence[Member], plan: Plan | None) -> Iterator[Metric]:
        mesh = self._view.mesh
        partners = {stage.node for stage in plan.stages} if plan is not None else set()
        partners = partners if mesh.me in partners or (plan is not None and plan.host == mesh.me) else set()
        peers = [m for m in members if m.id != mesh.me and (m.connected or (m.present and m.id in partners))]
        connected = Counter(_kind(member) for member in peers if member.connected)
        yield labelled(
            "mesh_llm_peers",
            "Members that this node is connected to.",
            ("role",),
            [((role,), connected[role]) for role in _KINDS],
        )
        # Whom a plan is shared with comes first.
        peers.sort(key=lambda member: (member.id not in partners, member.id))
        rows = [((mesh.name_of(m.id), m.id[:_ID_SHOWN]), m.id) for m in peers[:_PEERS_SHOWN]]
        links = {id: link for _, id in rows if (link := mesh.paths.link_to(id)) is not None}
        meters = {id: mesh.paths.meter(id) for _, id in rows}
        yield labelled(
            "mesh_llm_link_info",
            "Kind of path that data takes to a peer: local, quic, tcp or relay; always 1.",
            (*PEER, "kind"),
            [((*labels, links[id].kind), 1) for labels, id in rows if id in links],
        )
        yield labelled(
            "mesh_llm_link_round_trip_seconds",
            "Round trip to a peer: smoothed pings; on one machine, the time of a hop over a socket.",
            PEER,
            [(labels, links[id].rtt_s) for labels, id in rows if id in links],
        )
        yield labelled(
            "mesh_llm_link_peak_bytes_per_second",
            "Highest rate, both ways together, that a peer's connection has carried.",
            PEER,
            [(labels, meters[id].peak_bytes_per_s) for labels, id in rows],
        )
        yield summed(
            "mesh_llm_link_sent_bytes",
            "Bytes sent on the connection to a peer; links on one machine are not included.",
            PEER,
            [(labels, meters[id].sent_bytes) for labels, id in rows],
        )
        yield summed(
            "mesh_llm_link_received_bytes",
            "Bytes received on the connection to a peer; links on one machine are not included.",
            PEER,
            [(labels, meters[id].received_bytes) for labels, id in rows],
        )

    def _engine(self) -> Iterator[Metric]:
        """Of the default model."""
        hosting = self._view.hosting
        run = hosting.serving or hosting.starting
        report = _report(run)
        yield one_of(
            "mesh_llm_engine_state",
            "The state of this node's engine: 1 for the current one.",
            EngineState,
            report.state,
        )
        yield gauge(
            "mesh_llm_engine_ready_seconds", "Time that the engine's last start took.", report.ready_s
        )
        yield gauge(
            "mesh_llm_engine_decode_tokens_per_second",
            "Decoding speed of this node's engine, measured over its last answers.",
            run.rates.decode_tok_s if run is not None else 0.0,
        )
        yield gauge(
            "mesh_llm_engine_prompt_tokens_per_second",
            "Prompt speed of this node's engine, measured over its last answers.",
            run.rates.prompt_tok_s if run is not None else 0.0,
        )
        yield from _guesses((run.speculation if run is not None else None) or SpeculationCounters())
        yield labelled(
            "mesh_llm_engine_buffer_bytes",
            "The engine's buffers by kind, as it reports them.",
            ("kind",),
            [((kind,), size) for kind, size in sorted(report.buffers.items())],
        )

    def _lanes(self) -> Iterator[Metric]:
        """Of all models that have engines here."""
        runs = [
            (view.health().model or "", run)
            for view in self._view.models()
            if (run := view.hosting.serving or view.hosting.starting) is not None
        ]
        yield labelled(
            "mesh_llm_engine_lanes",
            "Engines of this node that answer with the model.",
            ("model",),
            [
                ((model,), sum(lane.report.state is EngineState.READY for lane in run.lanes.all))
                for model, run in runs
            ],
        )
        yield labelled(
            "mesh_llm_engine_lane_requests",
            "Requests that each engine of this node answers now.",
            ("model", "lane"),
            [
                ((model, str(lane.number)), run.lanes.turns.taken(lane.url))
                for model, run in runs
                for lane in run.lanes.all
            ],
        )
        yield summed(
            "mesh_llm_weights_sent_bytes",
            "Weights that went over links because a worker lacked the model's file.",
            (),
            [((), sum(each.weight_bytes for _, run in runs for each in run.counters().values()))],
        )

    def _memory(self) -> Iterator[Metric]:
        view = self._view
        yield gauge(
            "mesh_llm_memory_offered_bytes",
            "Memory that this node gives to models, devices included.",
            usable_bytes(view.mesh.facts),
        )
        yield gauge(
            "mesh_llm_memory_lent_bytes", "Of it, lent to the hosts of plans.", view.lending.lent_bytes
        )
        runs = [run for model in view.models() if (run := model.hosting.serving) is not None and run.port]
        stages = [stage for run in runs for stage in run.plan.stages if stage.node == view.id]
        own = sum(stage.weight_bytes for stage in stages)
        yield labelled(
            "mesh_llm_weights_resident_bytes",
            "Weights in the memory of this node's children.",
            ("process",),
            [(("engine",), own), (("worker",), view.lending.resident_bytes)],
        )

    def _processes(self) -> Iterator[Metric]:
        view = self._view
        lanes = [lane for model in view.models() for run in model.hosting.runs for lane in run.lanes.all]
        engines = [pid for lane in lanes if (pid := lane.report.pid) is not None]
        # A llama-server of the user's own is a child of our child.
        used = {
            "node": usage([os.getpid()]),
            "engine": usage(engines, with_children=view.config.bin_dir is not None),
            "worker": usage(view.lending.worker_pids),
        }
        yield labelled(
            "mesh_llm_process_resident_memory_bytes",
            "Main memory of this node's processes.",
            ("process",),
            [((name,), used.resident_bytes) for name, used in used.items()],
        )
        yield labelled(
            "mesh_llm_process_open_fds",
            "Open file descriptors of this node's processes.",
            ("process",),
            [((name,), used.open_fds) for name, used in used.items()],
        )
        yield summed(
            "mesh_llm_process_cpu_seconds",
            "Processor time of this node's processes that run now.",
            ("process",),
            [((name,), used.cpu_s) for name, used in used.items()],
        )

    def _counts(self) -> Iterator[Metric]:
        mesh, lending, tally = self._view.mesh, self._view.lending, self._view.hosting.tally
        yield summed(
            "mesh_llm_process_starts",
            "Starts of this node's children, the first one included.",
            ("process",),
            [(("engine",), self._engine_starts), (("worker",), lending.starts)],
        )
        yield summed(
            "mesh_llm_process_deaths",
            "Unexpected deaths of this node's children.",
            ("process",),
            [(("engine",), self._engine_deaths), (("worker",), lending.deaths)],
        )
        for name, text, value in (
            ("proposed", "Plans that this node began to bring up as their host.", tally.proposed),
            ("served", "Hosted plans that came to serve.", tally.served),
            ("failed", "Hosted plans that failed, before they served or later.", tally.failed),
            ("dropped", "Hosted plans that were dropped for another one before they served.", tally.dropped),
        ):
            yield summed(f"mesh_llm_plans_{name}", text, (), [((), value)])
        yield summed(
            "mesh_llm_workers_lost",
            "Workers that refused their layers, or were lost with them.",
            (),
            [((), tally.workers_lost)],
        )
        yield summed(
            "mesh_llm_peer_connections",
            "Connections made to members: to a new one, or again to a known one.",
            ("member",),
            [((kind,), mesh.connections[kind]) for kind in ("new", "again")],
        )
        yield summed(
            "mesh_llm_peer_disconnections",
            "Connections that ended because the member left, this node closed it, or it was lost.",
            ("reason",),
            [((reason,), mesh.disconnections[reason]) for reason in ("left", "closed", "lost")],
        )

    def _progress(self) -> Iterator[Metric]:
        at, step = self._step or (0.0, None)
        if step is None or step.unit != "bytes" or step.done >= step.total:
            return
        if time.monotonic() - at > _PROGRESS_KEPT_S:
            return
        done, size = "mesh_llm_transfer_done_bytes", "mesh_llm_transfer_size_bytes"
        what = [((step.what,), step.done)]
        yield labelled(done, "Bytes done of what is being fetched, unpacked or loaded now.", ("what",), what)
        yield labelled(
            size,
            "Size of what is being fetched, unpacked or loaded now.",
            ("what",),
            [((step.what,), step.total)],
        )


def _members(members: Iterable[Member]) -> Iterator[Metric]:
    standings: Counter[Standing] = Counter()
    states: Counter[tuple[Role, State]] = Counter()
    for member in members:
        standings[member.standing] += 1
        if member.present:
            states[_kind(member), member.facts.state] += 1
    yield labelled(
        "mesh_llm_members",
        "Members of the mesh that this node knows, itself included, by standing.",
        ("standing",),
        [((standing,), standings[standing]) for standing in Standing],
    )
    yield labelled(
        "mesh_llm_members_present",
        "Members that are here, by role and state.",
        ("role", "state"),
        [((role, state), states[role, state]) for role in _KINDS for state in State],
    )


def _work(
    stages: Sequence[tuple[tuple[str, ...], Place]], sums: Mapping[Place, StageCounters]
) -> Iterator[Metric]:
    """What the workers of this node's plan have done."""
    known = [(labels, sums[place]) for labels, place in stages if place in sums]
    for name, text, rows in (
        (
            "runs",
            "Runs of a worker's layers: one for each token, or batch of them.",
            [(labels, s.runs) for labels, s in known],
        ),
        (
            "compute_seconds",
            "Time that a worker computed.",
            [(labels, s.compute_ns * _NS) for labels, s in known],
        ),
        (
            "wait_seconds",
            "Time that a worker waited for something to do.",
            [(labels, s.wait_ns * _NS) for labels, s in known],
        ),
        ("sent_bytes", "Bytes from the host to a worker.", [(labels, s.sent_bytes) for labels, s in known]),
        (
            "received_bytes",
            "Bytes from a worker to the host.",
            [(labels, s.received_bytes) for labels, s in known],
        ),
    ):
        yield summed(f"mesh_llm_stage_{name}", text, STAGE, rows)


def _pace(
    stages: Sequence[tuple[tuple[str, ...], Place]], paces: Mapping[Place, StageCounters]
) -> Iterator[Metric]:
    """The same for each token, over the last second in which there was something to do."""
    known = [(labels, found) for labels, place in stages if (found := paces.get(place)) and found.runs > 0]
    for name, text, rows in (
        (
            "compute_seconds",
            "Time that a worker computed for each run of its last busy second.",
            [(labels, p.compute_ns * _NS / p.runs) for labels, p in known],
        ),
        (
            "wait_seconds",
            "Time that a worker waited for each run of its last busy second.",
            [(labels, p.wait_ns * _NS / p.runs) for labels, p in known],
        ),
        (
            "bytes",
            "Bytes between a worker and the host for each run of its last busy second.",
            [(labels, (p.sent_bytes + p.received_bytes) / p.runs) for labels, p in known],
        ),
    ):
        yield labelled(f"mesh_llm_stage_token_{name}", text, STAGE, rows)


def _guesses(seen: SpeculationCounters) -> Iterator[Metric]:
    by = ("text", "model")
    drafted = (seen.text_drafted, seen.drafted - seen.text_drafted)
    accepted = (seen.text_accepted, seen.accepted - seen.text_accepted)
    yield summed(
        "mesh_llm_draft_tokens",
        "Tokens drafted from the earlier text (n-gram), or by the draft model or the model's own MTP head.",
        ("by",),
        [((one,), count) for one, count in zip(by, drafted, strict=True)],
    )
    yield summed(
        "mesh_llm_draft_accepted_tokens",
        "Drafted tokens that were accepted.",
        ("by",),
        [((one,), count) for one, count in zip(by, accepted, strict=True)],
    )
    yield gauge("mesh_llm_draft_depth_tokens", "Number of tokens in the last draft.", seen.depth)
    yield gauge(
        "mesh_llm_draft_gain_ratio",
        "Decoding speed relative to the speed without speculative decoding; 1 before anything was drafted.",
        seen.plain_seconds / seen.seconds if seen.seconds else 1.0,
    )


def _planned_lanes(model: ModelView) -> int:
    return sum(serving.plan.lanes for _, serving in model.plans.replicas().values())


def _report(run: PlanRun | None) -> EngineReport:
    return run.supervisor.report if run is not None and run.supervisor is not None else EngineReport()


_KINDS = (Role.NODE, Role.CLIENT)


def _kind(member: Member) -> Role:
    """An owner is a node as others are, as far as counting goes."""
    return Role.CLIENT if member.facts.role is Role.CLIENT else Role.NODE
