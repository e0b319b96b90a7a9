"""The best plan for a snapshot as if nothing ran yet. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from mesh_llm.defaults import CLEARLY_FASTER, PLAN_SEARCH_STEPS, USEFUL_CONTEXT
from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.planning.cuts import MAX_DEVICES, forbidden, may_split, too_many
from mesh_llm.planning.election import rank, solo_hosts, split_hosts
from mesh_llm.planning.eligibility import Eligible, roster_of, split_refusal
from mesh_llm.planning.fit import (
    CONTEXT_STEP,
    gigabytes,
    largest_context_where,
    memory_need,
    smallest_context,
)
from mesh_llm.planning.layer_shares import capacity
from mesh_llm.planning.manual_layers import by_names, by_ratios, on_devices, shortfall
from mesh_llm.planning.memory_layout import total_bytes
from mesh_llm.planning.placement import (
    Layout,
    alone,
    filled,
    seconds_of,
    spread_out,
    with_head,
    with_head_at_best,
)
from mesh_llm.planning.plan_inputs import PlanInputs, ground_of
from mesh_llm.planning.predict import least_seconds, solo_seconds
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.planning.speculation import cache_settings
from mesh_llm.planning.worker_choice import WORTH, apart, best_with, faster, largest_first
from mesh_llm.types import HostingMode, ModelFacts, NodeId, Place

PLAN_HOSTS_TRIED = 3
"""For each engine version: who is elected nearly always can; a tiny one that its owner prefers may not."""
_COMPARED_HOSTS = 8
"""Up to so many, the best split of each is looked for; of more that of the elected one."""


Remake = Callable[[PlanInputs], Layout | None]
"""The same kind of layout over the same nodes, under another context."""


@frozen
class Question:
    """What is to be decided, and all that it depends on."""

    snapshot: Snapshot
    model: ModelFacts
    settings: ModelSettings
    roster: Eligible
    inputs: PlanInputs

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens per slot to try, the better first."""
        if self.settings.context is not None:
            return (self.settings.context,)
        smallest = smallest_context(self.model)
        return (useful_context(self.model), smallest)

    @property
    def forced(self) -> bool:
        return self.settings.tensor_split is not None or self.settings.layers is not None

    def elected(self) -> tuple[Candidate, ...]:
        return split_hosts(self.roster.hosts, self.inputs.rooms, self.lacking)

    @property
    def lacking(self) -> frozenset[NodeId]:
        """Nodes without the projector."""
        projector = self.settings.projector
        if projector is None:
            return frozenset()
        held = {node.id: {model.fingerprint for model in node.facts.models} for node in self.snapshot.nodes}
        return frozenset(node for node, own in held.items() if projector.digest not in own)

    def partners(self, host: Candidate) -> tuple[NodeId, ...]:
        """Who can compute together with it."""
        able = (node for node in self.roster.able if node.id != host.id and not split_refusal(node, host))
        return tuple(node.id for node in able)


def useful_context(model: ModelFacts) -> int:
    stepped = min(USEFUL_CONTEXT, model.context_trained) // CONTEXT_STEP * CONTEXT_STEP
    return max(stepped, smallest_context(model))


@frozen
class Proposal:
    inputs: PlanInputs
    """At the context that was chosen."""
    layout: Layout
    reason: str


@frozen
class Shortage:
    """Why there can be no plan yet."""

    reason: str
    need_bytes: int
    have_bytes: int


def question(
    snapshot: Snapshot, model: ModelFacts, settings: ModelSettings, barred: Mapping[NodeId, str]
) -> Question:
    cache = cache_settings(
        model, settings, smallest_context(model) if settings.context is None else settings.context
    )
    return Question(
        snapshot=snapshot,
        model=model,
        settings=settings,
        roster=roster_of(snapshot, model, settings, barred),
        inputs=ground_of(snapshot, model, cache),
    )


def propose(asked: Question) -> Proposal | Shortage:
    if not asked.roster.able:
        return shortage(asked, _nobody(asked))
    if all(node.id in asked.roster.parts for node in asked.roster.able):
        return shortage(asked, f"no node here has all of the model {asked.settings.model}")
    if not asked.roster.hosts:
        return shortage(asked, "no node that has the model may host: all have --hosting never")
    if asked.forced:
        return _forced(asked)
    grounds = [asked.inputs.at(context) for context in asked.contexts]
    for inputs in grounds if asked.settings.split else ():
        if found := _spread(asked, inputs):
            return found
    for inputs in grounds:
        if found := _best(asked, inputs):
            return found
    return shortage(asked)


def _nobody(asked: Question) -> str:
    """Why no node can take part: those that have the model are kept from it, or there are none."""
    model, roster = asked.settings.model, asked.roster
    for node in asked.snapshot.nodes:
        if node.alive and node.facts.name and node.id not in roster.parts and node.id in roster.refused:
            return (
                f"no node that has the model {model} can compute: {node.facts.name} {roster.refused[node.id]}"
            )
    return f"no node here has the model {model}"


def shortage(asked: Question, reason: str = "") -> Shortage:
    need = memory_need(asked.model, asked.inputs.load.settings).total_bytes
    have, count = available(asked)
    if not reason:
        reason = f"need {gigabytes(need)} for the model, have {gigabytes(have)} on {_nodes(count)}"
        if need <= have:
            reason += f", but {_hindrance(asked, count)}"
    return Shortage(reason=reason, need_bytes=need, have_bytes=have)


def _hindrance(asked: Question, nodes: int) -> str:
    if not may_split(asked.model):
        return "no node holds it alone, and a model of its architecture cannot be split"
    if nodes > MAX_DEVICES + 1:
        return f"no {MAX_DEVICES + 1} of them hold it, and more cannot take part in a plan"
    # Every further stage has scratch memory of its own, and layers are not divided.
    layer = max(layer.weight_bytes for layer in asked.model.layers)
    return f"not in pieces that hold whole layers of {gigabytes(layer)}"


def available(asked: Question, host: NodeId | None = None) -> tuple[int, int]:
    """Memory of the nodes that could compute together with a host or with the one elected; their number."""
    nodes = tuple(node.id for node in asked.roster.able)
    leader = asked.snapshot.node(host) if host else next(iter(asked.elected()), None)
    if leader:
        nodes = (leader.id, *asked.partners(leader))
    hosting = leader.id if leader else None
    devices = asked.inputs.devices
    places = (place for node in nodes for place in ((Place(node),) if node == hosting else devices[node]))
    return total_bytes(asked.inputs.room(place, host=hosting) for place in places), len(nodes)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def propose_alone(asked: Question) -> Proposal | Shortage:
    """The best plan on one node, even where several are clearly faster."""
    grounds = (asked.inputs.at(context) for context in asked.contexts)
    found = ((inputs, _alone(asked, inputs)) for inputs in grounds)
    return next((_solo(asked, inputs, each) for inputs, each in found if each), None) or shortage(asked)


def _best(asked: Question, inputs: PlanInputs) -> Proposal | None:
    """On one node where one holds it, unless several are clearly faster: fewer can fail."""
    solo = _alone(asked, inputs)
    if solo and (asked.settings.split or not _may_be_slow(inputs, solo)):
        return _solo(asked, inputs, solo)
    several = _several(asked, inputs, solo)
    if several and (solo is None or faster(inputs, several, solo.layout, times=CLEARLY_FASTER)):
        reason = _why_several(asked, inputs, several, solo)
        return _grown(asked, inputs, several, _refill(several.host, several.workers), reason)
    return _solo(asked, inputs, solo) if solo else None


@frozen
class _Alone:
    """The best of those nodes that hold the whole model."""

    host: Candidate
    layout: Layout
    among: int
    measured: bool
    """Whether the speeds of all of them are known."""


def _alone(asked: Question, inputs: PlanInputs) -> _Alone | None:
    fits = {node.id: layout for node in asked.roster.hosts if (layout := alone(inputs, node.id))}
    seconds = {id: solo_seconds(inputs, id) for id in fits}
    hosts = solo_hosts(
        (node for node in asked.roster.hosts if node.id in fits), inputs.rooms, seconds, asked.lacking
    )
    if not hosts:
        return None
    measured = None not in seconds.values()
    return _Alone(host=hosts[0], layout=fits[hosts[0].id], among=len(fits), measured=measured)


def _may_be_slow(inputs: PlanInputs, solo: _Alone) -> bool:
    """Whether others could be clearly faster: a look at all speeds is much quicker than a search."""
    seconds = solo_seconds(inputs, solo.host.id)
    return seconds is not None and seconds > CLEARLY_FASTER * least_seconds(inputs)


def _solo(asked: Question, inputs: PlanInputs, solo: _Alone) -> Proposal:
    reason = f"fits on {solo.host.facts.name} alone"
    if asked.settings.split:
        reason += "; --split finds no other node that can take part"
    elif solo.among > 1:
        reason += _why_this_one(solo.host, solo.among, measured=solo.measured)
    return _grown(asked, inputs, solo.layout, lambda other: alone(other, solo.host.id), reason)


def _candidate(asked: Question, id: NodeId) -> Candidate:
    node = asked.snapshot.node(id)
    assert node is not None  # it has a part in a layout
    return node


def _why_this_one(host: Candidate, count: int, *, measured: bool) -> str:
    if host.facts.hosting is HostingMode.PREFER:
        return ", which prefers to host"
    return f", the {'fastest' if measured else 'largest'} of {count} nodes that hold it"


def _tried(asked: Question) -> list[Candidate]:
    """Hosts worth trying: all of a small mesh, or else those elected, for each engine version."""
    if len(asked.roster.hosts) <= _COMPARED_HOSTS:
        return list(asked.elected())
    # Where none has room for the head, it may still lie on a worker.
    return _heading(asked, head=True) or _heading(asked, head=False)


def _heading(asked: Question, *, head: bool) -> list[Candidate]:
    """Those elected where the embedding fits with the smallest context, and the output head too if `head`."""
    smallest = asked.inputs.at(asked.contexts[-1])
    seen: Counter[str] = Counter()
    hosts = []
    for node in asked.elected():
        room = smallest.rooms[node.id]
        if seen[node.facts.engine] == PLAN_HOSTS_TRIED:
            continue
        if capacity(room, smallest.load, host=True, head=head) is not None:
            seen[node.facts.engine] += 1
            hosts.append(node)
    return hosts


def _several(asked: Question, inputs: PlanInputs, solo: _Alone | None) -> Layout | None:
    """The best over several nodes that is found: of the elected host that can, or of one that is faster."""
    hosts = _tried(asked)
    compared = len(asked.roster.hosts) <= _COMPARED_HOSTS
    least = rank(solo.host, asked.lacking) if solo else None
    best: Layout | None = None
    for host in hosts:
        if least and _rank(asked, host.id) > least:
            break
        found = best_with(inputs, host.id, asked.partners(host), steps=PLAN_SEARCH_STEPS // len(hosts))
        if found and (best is None or faster(inputs, found, best, times=WORTH)):
            best, least = found, _rank(asked, host.id)
        if best and not compared:
            return _rehosted(asked, inputs, best)
    return best


def _rehosted(asked: Question, inputs: PlanInputs, layout: Layout) -> Layout:
    """The same nodes, and the best of them as the host."""
    best = layout
    for id in layout.workers:
        if not asked.roster.may_host(_candidate(asked, id)) or _rank(asked, id) > _rank(asked, layout.host):
            continue
        found = filled(inputs, id, sorted(layout.nodes - {id}), quick=True)
        if found and faster(inputs, found, best, times=WORTH):
            best = found
    return best


def _rank(asked: Question, id: NodeId) -> tuple[bool, bool]:
    return rank(_candidate(asked, id), asked.lacking)


def _why_several(asked: Question, inputs: PlanInputs, layout: Layout, solo: _Alone | None) -> str:
    count = _nodes(len(layout.nodes))
    if solo:
        return f"fits on {solo.host.facts.name} alone, but {count} together are clearly faster"
    lent = [inputs.lent[span.place] for span in layout.spans if span.device]
    on_gpus = lent and all(room.gpus for room in lent)
    return f"{_too_much_for_one(asked, inputs)}; {count} do" + (", workers on their GPUs" if on_gpus else "")


def _refill(host: NodeId, workers: tuple[NodeId, ...]) -> Remake:
    return lambda inputs: filled(inputs, host, workers)


def _too_much_for_one(asked: Question, inputs: PlanInputs) -> str:
    smallest, context = inputs.at(asked.contexts[-1]), inputs.load.settings.context
    if smallest is not inputs and any(alone(smallest, node.id) for node in asked.roster.hosts):
        return f"no node alone holds it with {context} tokens of context"
    return "no node holds it alone"


def _spread(asked: Question, inputs: PlanInputs) -> Proposal | None:
    for host in _tried(asked):
        most = min(asked.inputs.load.count - 1, MAX_DEVICES - len(inputs.rooms[host.id].gpus))
        able = largest_first(inputs, asked.partners(host))
        for nodes in (able, apart(inputs, host.id, able)):
            workers = [node for _, node in nodes[: max(0, most)]]
            while workers:
                layout = spread_out(inputs, host.id, workers)
                if layout:
                    reason = f"--split: over all {_nodes(len(layout.nodes))} that can take part"
                    return _grown(asked, inputs, layout, _respread(host.id, tuple(workers)), reason)
                workers.pop()
    return None


def _respread(host: NodeId, workers: tuple[NodeId, ...]) -> Remake:
    return lambda inputs: spread_out(inputs, host, workers)


def _forced(asked: Question) -> Proposal | Shortage:
    told = _as_told(asked)
    if isinstance(told, str):
        return shortage(asked, told)
    wrong = ""
    for context in asked.contexts:
        inputs = asked.inputs.at(context)
        layout = on_devices(inputs, told)
        wrong = _short(inputs, layout)
        if not wrong:
            option = "--tensor-split" if asked.settings.layers is None else "--layers"
            return _grown(asked, inputs, layout, _unless_short(told), f"as {option} says")
    return shortage(asked, wrong)


def _as_told(asked: Question) -> Layout | str:
    layout = _by_options(asked)
    if isinstance(layout, str) or layout.solo:
        return layout
    return forbidden(asked.inputs.load.facts, [span.first for span in layout.spans]) or layout


def _by_options(asked: Question) -> Layout | str:
    count, elected = asked.inputs.load.count, asked.elected()
    if asked.settings.layers is not None:
        return by_names(count, asked.settings.layers, asked.snapshot, asked.roster, elected)
    if not elected:
        return "no node that may host can be part of a split"
    return by_ratios(count, asked.settings.tensor_split or (), elected[0], asked.roster.able)


def _unless_short(told: Layout) -> Remake:
    def remake(inputs: PlanInputs) -> Layout | None:
        layout = on_devices(inputs, told)
        return None if _short(inputs, layout) else layout

    return remake


def _short(inputs: PlanInputs, layout: Layout) -> str:
    workers = sum(span.node != layout.host for span in layout.spans)
    full = too_many(workers, len(inputs.rooms[layout.host].gpus)) if workers else ""
    return full or shortfall(inputs, layout)


def _with_lanes(
    asked: Question, inputs: PlanInputs, layout: Layout, remake: Remake
) -> tuple[PlanInputs, Layout]:
    """With as many lanes as a person asked for, or as fit; those that follow the demand get what is left."""
    for lanes in range(1 if layout.solo else asked.settings.lanes or 1, 1, -1):
        several = inputs.with_lanes(lanes)
        if (made := remake(several)) is not None:
            return several, made
    return inputs, layout


def _grown(asked: Question, inputs: PlanInputs, layout: Layout, remake: Remake, reason: str) -> Proposal:
    """With as much context as fits over the same nodes, unless that costs clearly more than it is worth:
    caches push weights from fast memory into slow."""
    inputs, layout = _with_lanes(asked, inputs, layout, remake)
    if asked.settings.context is None:
        seconds = seconds_of(inputs, layout)

        def fits(context: int) -> bool:
            other = inputs.at(context)
            made = remake(other)
            if made is None:
                return False
            slower = seconds_of(other, made)
            return seconds is None or slower is None or slower <= CLEARLY_FASTER * seconds

        known = inputs.load.settings.context
        inputs = inputs.at(largest_context_where(asked.model, fits, at_least=known) or known)
        layout = remake(inputs) or layout
    # What a person put in order stays in order.
    layout = with_head(inputs, layout) if asked.forced else with_head_at_best(inputs, layout)
    return Proposal(inputs=inputs, layout=layout, reason=reason)
