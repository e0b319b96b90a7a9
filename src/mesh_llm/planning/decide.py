"""The plan that should run: what every node works out for itself, from what it knows. Pure.

The same snapshot gives the same plan on every node, in whatever order its
members are listed. A plan that runs is kept while it is valid and not clearly
beaten: speeds and delays are measured, and a restart costs everybody a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from types import MappingProxyType

from mesh_llm.defaults import CLEARLY_FASTER
from mesh_llm.errors import UsageError
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.cuts import forbidden
from mesh_llm.planning.eligibility import split_refusal
from mesh_llm.planning.exclusion import exclusions
from mesh_llm.planning.fit import smallest_context, stage_need
from mesh_llm.planning.lanes import lanes_for
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.manual_layers import obeys_names, obeys_ratios
from mesh_llm.planning.memory_budget import used_gpus
from mesh_llm.planning.memory_layout import Allocation
from mesh_llm.planning.placement import Layout, seconds_of
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.predict import prediction
from mesh_llm.planning.proposal import (
    Proposal,
    Question,
    Shortage,
    available,
    propose,
    propose_alone,
    question,
    useful_context,
)
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.planning.speculation import leaner
from mesh_llm.types import Exclusion, Mode, ModelFacts, NodeId, Plan, ServingPlan, Stage

DELAY_LESS = 0.5
DELAY_MORE = 1.5
"""How far delays stray while nothing changes: a running plan is judged by less, its challenger by more."""


_NOBODY: Mapping[NodeId, str] = MappingProxyType({})


def decide(
    snapshot: Snapshot,
    model: ModelFacts,
    settings: ModelSettings,
    *,
    current: ServingPlan | None,
    barred: Mapping[NodeId, str] = _NOBODY,
    beatable: bool = True,
    lanes: int = 1,
) -> Plan:
    """The plan that should run, with a reason for every node that has no part in it.

    `barred` are nodes that refused or failed a moment ago, with their reasons. A current plan that is
    not `beatable` is kept as long as it is valid, however good others would be. `lanes` are what
    requests ask for; as many as there is memory for, unless the settings name a number.
    A host without layers has no stage, and is not among the excluded either.
    Where what guesses ahead does not fit, it is left out: without it the model runs at all.
    """
    plan = _decide(snapshot, model, settings, current, barred, beatable, lanes)
    if plan.mode is not Mode.WAITING:
        return plan
    wishes = leaner(model, settings)
    bare = (_decide(snapshot, model, wish, current, barred, beatable, lanes) for wish in wishes)
    return next((other for other in bare if other.mode is not Mode.WAITING), plan)


def _decide(
    snapshot: Snapshot,
    model: ModelFacts,
    settings: ModelSettings,
    current: ServingPlan | None,
    barred: Mapping[NodeId, str],
    beatable: bool,
    lanes: int,
) -> Plan:
    try:
        asked = question(snapshot, model, settings, barred)
    except UsageError as error:
        return _impossible(snapshot, model, settings, error.message)
    best = propose(asked)
    kept = _kept(asked, current.plan, best if beatable else None) if current else None
    return _plan(asked, kept or best, lanes)


def decide_alone(
    snapshot: Snapshot, model: ModelFacts, settings: ModelSettings, *, barred: Mapping[NodeId, str] = _NOBODY
) -> Plan:
    """The plan on one node, for people who compare; waiting where none holds the model."""
    asked = question(snapshot, model, settings, barred)
    return _plan(asked, propose_alone(asked), 1)


def _kept(asked: Question, running: Plan, best: Proposal | Shortage | None) -> Proposal | None:
    """The running plan with its figures brought up to date, or None where another has to take its place."""
    layout = _valid(asked, running)
    if layout is None:
        return None
    inputs = asked.inputs.at(running.context)
    if isinstance(best, Proposal) and _beaten(asked, inputs, layout, best):
        return None
    return Proposal(inputs=inputs, layout=layout, reason=running.reason)


def _valid(asked: Question, running: Plan) -> Layout | None:
    settings = asked.settings
    if running.host is None or not running.stages or running.slots != settings.slots:
        return None
    if running.context < 1 or settings.context not in (None, running.context):
        return None
    layout = Layout(
        host=running.host,
        spans=tuple(Span(stage.node, stage.first, stage.last, stage.device) for stage in running.stages),
        head_on_worker=running.head_on_worker,
    )
    if not _covers(layout, asked.inputs.load.count) or not _able(asked, layout) or not _obeys(asked, layout):
        return None
    if not layout.solo and forbidden(asked.inputs.load.facts, (span.first for span in layout.spans)):
        return None
    inputs = asked.inputs.at(running.context)
    allocations = inputs.allocations(layout.host, layout.spans, head_on_worker=layout.head_on_worker)
    return layout if allocations is not None else None


def _covers(layout: Layout, count: int) -> bool:
    position = 0
    for span in layout.spans:
        if span.first != position or span.last <= span.first:
            return False
        position = span.last
    return position == count


def _able(asked: Question, layout: Layout) -> bool:
    """Everybody in it is still there, and still may do its part."""
    host = asked.snapshot.node(layout.host)
    if host is None or not asked.roster.may_host(host):
        return False
    for id in layout.nodes:
        node = asked.snapshot.node(id)
        if node is None or not asked.roster.keeps(id):
            return False
        if not layout.solo and split_refusal(node, host):
            return False
    return all(span.place in asked.inputs.lent for span in layout.spans)


def _obeys(asked: Question, layout: Layout) -> bool:
    settings = asked.settings
    if settings.layers is not None:
        return obeys_names(settings.layers, asked.snapshot, layout)
    if settings.tensor_split is not None:
        return obeys_ratios(asked.inputs.load.count, settings.tensor_split, layout)
    return True


def _beaten(asked: Question, inputs: PlanInputs, layout: Layout, best: Proposal) -> bool:
    if asked.forced:
        return False
    if asked.settings.split and len(best.layout.spans) != len(layout.spans):
        return len(best.layout.spans) > len(layout.spans)
    if inputs.load.settings.context < useful_context(asked.model) <= best.inputs.load.settings.context:
        return asked.settings.context is None
    if _are_alike(asked.snapshot, layout, best.layout):
        return False
    # Delays stray by themselves: only what would be better in spite of that is.
    now = seconds_of(inputs, layout, delay_factor=DELAY_LESS)
    then = seconds_of(best.inputs, best.layout, delay_factor=DELAY_MORE)
    return now is not None and then is not None and now >= CLEARLY_FASTER * then


def _are_alike(snapshot: Snapshot, one: Layout, other: Layout) -> bool:
    """Whether one node computes all, of two on the same cores: their speeds differ as far as others disturbed
    the measuring."""
    nodes = snapshot.node(one.host), snapshot.node(other.host)
    if not one.solo or not other.solo or nodes[0] is None or nodes[1] is None:
        return False
    here, there = nodes[0].facts, nodes[1].facts
    same = bool(here.machine) and (here.machine, here.threads) == (there.machine, there.threads)
    return same and not used_gpus(here) and not used_gpus(there)


def _plan(asked: Question, best: Proposal | Shortage, demand: int) -> Plan:
    if isinstance(best, Shortage):
        return _waiting(
            asked.inputs.load.settings.context,
            asked.settings.slots,
            best,
            exclusions(asked, asked.inputs, None),
        )
    layout = best.layout
    lanes, lanes_reason = lanes_for(asked.settings, best.inputs, layout, demand)
    inputs = best.inputs.with_lanes(lanes)
    lie = inputs.allocations(layout.host, layout.spans, head_on_worker=layout.head_on_worker) or ()
    stages = tuple(_stage(inputs, layout, span, lies) for span, lies in zip_longest(layout.spans, lie))
    need = sum(stage.need_bytes for stage in stages)
    if all(span.node != layout.host for span in layout.spans):
        need += _need(inputs, layout, Span(layout.host, 0, 0))[1]
    return Plan(
        mode=Mode.SOLO if layout.solo else Mode.SPLIT,
        host=layout.host,
        stages=stages,
        context=inputs.load.settings.context,
        slots=asked.settings.slots,
        head_on_worker=layout.head_on_worker,
        need_bytes=need,
        have_bytes=available(asked, layout.host)[0],
        predicted=prediction(inputs, layout.host, layout.spans, head_on_worker=layout.head_on_worker),
        excluded=exclusions(asked, inputs, layout),
        reason=best.reason,
        lanes=lanes,
        lanes_reason=lanes_reason,
    )


def _stage(inputs: PlanInputs, layout: Layout, span: Span, lies: Allocation | None) -> Stage:
    weights, need = _need(inputs, layout, span)
    return Stage(
        node=span.node,
        first=span.first,
        last=span.last,
        weight_bytes=weights,
        need_bytes=need,
        share=(span.last - span.first) / inputs.load.count,
        device=span.device,
        main_bytes=min(need, lies.main_bytes) if lies is not None else None,
    )


def _need(inputs: PlanInputs, layout: Layout, span: Span) -> tuple[int, int]:
    """Weights of its layers, and all that they need with embedding, head, cache and scratch memory."""
    host = span.node == layout.host
    head = span == layout.spans[-1] if layout.head_on_worker else host
    facts, layers = inputs.load.facts, (span.first, span.last)
    need = stage_need(facts, inputs.load.settings, layers, host=host, head=head)
    return sum(layer.weight_bytes for layer in facts.layers[slice(*layers)]), need.total_bytes


def _waiting(context: int, slots: int, short: Shortage, excluded: tuple[Exclusion, ...]) -> Plan:
    return Plan(
        mode=Mode.WAITING,
        host=None,
        stages=(),
        context=context,
        slots=slots,
        head_on_worker=False,
        need_bytes=short.need_bytes,
        have_bytes=short.have_bytes,
        predicted=None,
        excluded=excluded,
        reason=short.reason,
    )


def _impossible(snapshot: Snapshot, model: ModelFacts, settings: ModelSettings, reason: str) -> Plan:
    """Settings that no engine takes: nobody has a part, whatever they have."""
    return _waiting(
        settings.context or smallest_context(model),
        settings.slots,
        Shortage(reason=reason, need_bytes=0, have_bytes=0),
        tuple(Exclusion(node=node.id, reason=reason) for node in snapshot.nodes),
    )
