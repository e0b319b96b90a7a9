"""Layers where a person wants them: --tensor-split and --layers, to the letter. Pure.

Each function returns a layout, or a sentence that says why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mesh_llm.planning.cuts import furthest_cut
from mesh_llm.planning.eligibility import Eligible, split_refusal
from mesh_llm.planning.fit import gigabytes, stage_need
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.layer_shares import apportion
from mesh_llm.planning.memory_layout import Ledger, furthest
from mesh_llm.planning.placement import Layout
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.snapshot import Candidate, Snapshot, listing
from mesh_llm.types import NodeId, Role

NamedLayers = Sequence[tuple[str, int, int]]


def by_ratios(
    count: int, ratios: Sequence[float], host: Candidate, able: Sequence[Candidate]
) -> Layout | str:
    """Shares of `count` layers: the host's first, then the others' by id."""
    if not _are_shares(ratios):
        return "--tensor-split shares must be at least 0, and one of them above 0"
    order = listing(host.id, (node.id for node in able if not split_refusal(node, host)))
    if len(ratios) > len(order):
        here = "1 is" if len(order) == 1 else f"{len(order)} are"
        return f"--tensor-split names {len(ratios)} nodes, {here} here"
    return Layout(host=host.id, spans=shared_out(count, ratios, order))


def _are_shares(ratios: Sequence[float]) -> bool:
    return all(ratio >= 0 for ratio in ratios) and 0 < sum(ratios) < math.inf


def shared_out(count: int, ratios: Sequence[float], order: Sequence[NodeId]) -> tuple[Span, ...]:
    spans, first = [], 0
    for node, layers in zip(order, apportion(count, ratios), strict=False):
        if layers:
            spans.append(Span(node, first, first + layers))
            first += layers
    return tuple(spans)


def obeys_ratios(count: int, ratios: Sequence[float], layout: Layout) -> bool:
    """Whether a running plan has these shares: nodes that came since may have changed the order."""
    if not _are_shares(ratios):
        return False
    shares, ranges = apportion(count, ratios), layout.ranges
    own = [span.last - span.first for span in ranges if span.node == layout.host]
    order = listing(layout.host, (span.node for span in ranges))
    if tuple(span.node for span in ranges) != order:
        return False
    others = [span.last - span.first for span in ranges if span.node != layout.host]
    return (own or [0]) == shares[:1] and others == [share for share in shares[1:] if share]


def by_names(
    count: int, layers: NamedLayers, snapshot: Snapshot, roster: Eligible, elected: Sequence[Candidate]
) -> Layout | str:
    """Exact layers by node name. Who has the first layer hosts, if it may; else somebody without layers."""
    owners = _owners(layers, snapshot, roster)
    if isinstance(owners, str):
        return owners
    ranges = _ranges(layers)
    wrong = misfit(count, layers)
    if wrong:
        return wrong
    spans = tuple(Span(owners[name].id, first, last) for first, last, name in ranges)
    if len({span.node for span in spans}) < len(spans):
        return "--layers gives a node two ranges; give each node one"
    host = _host(spans, owners[ranges[0][2]], roster, elected)
    if host is None:
        return "--layers: no node that may host has the first layers, or no layers at all"
    for name, node in owners.items():
        refused = split_refusal(node, host) if len(spans) > 1 or host.id != node.id else ""
        if refused:
            return f"--layers names {name}, which {refused}"
    return Layout(host=host.id, spans=spans)


def has_first_layers(layers: NamedLayers, node: NodeId, name: str) -> bool:
    """Whether they are for this node, named by its id or by its name: then it hosts, if it may."""
    return any(first == 0 and each in (node, name) for first, _, each in _ranges(layers))


def obeys_names(layers: NamedLayers, snapshot: Snapshot, layout: Layout) -> bool:
    """Whether a running plan has these layers, its nodes named by their names or by their ids."""
    names = {node.id: node.facts.name for node in snapshot.nodes}
    wanted = {(first, last): name for first, last, name in _ranges(layers)}
    has = {(span.first, span.last): (span.node, names[span.node]) for span in layout.ranges}
    return has.keys() == wanted.keys() and all(wanted[span] in has[span] for span in has)


def _owners(layers: NamedLayers, snapshot: Snapshot, roster: Eligible) -> Mapping[str, Candidate] | str:
    names = sorted({name for name, _, _ in layers})
    here = {name: _called(name, snapshot) for name in names}
    missing = [name for name in names if not here[name]]
    if missing:
        return f"--layers names {', '.join(missing)}: no such node is here"
    for name in names:
        if len(here[name]) > 1:
            return f"--layers names {name}, and {len(here[name])} nodes are called that: give an id"
        if reason := roster.refused.get(here[name][0].id):
            return f"--layers names {name}, which has no part: {reason}"
    return {name: here[name][0] for name in names}


def _called(name: str, snapshot: Snapshot) -> list[Candidate]:
    """The one of that id, or else all of that name: nobody is put out by others who take it.

    Lite clients only where no node has the name; besides, they are here for one node and not for another.
    """
    here = [node for node in snapshot.nodes if node.alive]
    named = [node for node in here if node.id == name] or [node for node in here if node.facts.name == name]
    return [node for node in named if node.facts.role is not Role.CLIENT] or named


def _ranges(layers: NamedLayers) -> list[tuple[int, int, str]]:
    return sorted((first, last, name) for name, first, last in layers if first != last)


def misfit(count: int, layers: NamedLayers) -> str:
    """Why these layers are not those of a model with `count` of them, whoever is here; else empty."""
    expected = 0
    for first, last, name in _ranges(layers):
        if first != expected or last <= first:
            what = f"layer {expected} is missing" if first > expected else f"layer {first} is given twice"
            return f"--layers {name}={first}-{last - 1}: {what}"
        expected = last
    if expected != count:
        return f"--layers gives {expected} layers, the model has {count}"
    return ""


def _host(
    spans: Sequence[Span], first: Candidate, roster: Eligible, elected: Sequence[Candidate]
) -> Candidate | None:
    if roster.may_host(first):
        return first
    busy = {span.node for span in spans}
    return next((node for node in elected if node.id not in busy), None)


def on_devices(inputs: PlanInputs, layout: Layout) -> Layout:
    """The same with the layers of each worker on its devices, each filled before the next.

    The output head is the host's, unless it fits only with the last layers.
    """
    spans: list[Span] = []
    for span in layout.spans:
        several = span.node != layout.host and len(inputs.devices[span.node]) > 1
        spans += _on_devices(inputs, span) if several else [span]
    for head_on_worker in (False, True)[: 1 if layout.solo else 2]:
        if inputs.allocations(layout.host, spans, head_on_worker=head_on_worker) is not None:
            return Layout(host=layout.host, spans=tuple(spans), head_on_worker=head_on_worker)
    return Layout(host=layout.host, spans=tuple(spans))


def _on_devices(inputs: PlanInputs, span: Span) -> Iterator[Span]:
    places, first = inputs.devices[span.node], span.first
    for place in places:
        # What fits nowhere is the last one's, which then has too little room.
        last = span.last
        if place != places[-1]:
            room = Ledger().free(inputs.lent[place])
            reach = furthest(room, inputs.load, first, host=False, head=False)
            last = min(last, furthest_cut(inputs.load.facts, first if reach is None else reach, 0))
        if last > first:
            yield Span(span.node, first, last, place.device)
            first = last


def shortfall(inputs: PlanInputs, layout: Layout) -> str:
    """Which stage of a layout its node has no room for, in numbers; empty where all fit."""
    if inputs.allocations(layout.host, layout.spans, head_on_worker=layout.head_on_worker) is not None:
        return ""
    stages = list(layout.spans)
    if all(span.node != layout.host for span in stages):
        stages.insert(0, Span(layout.host, 0, 0))
    for span in stages:
        host = span.node == layout.host
        need = stage_need(
            inputs.load.facts, inputs.load.settings, (span.first, span.last), host=host, head=host
        ).total_bytes
        name, room = _name(inputs, span), inputs.room(span.place, host=layout.host)
        have = room.total_bytes
        if not host and room.gpus and span.last - span.first > room.gpu_layers:
            return f"{_layers(span)} are for {name}, which lends its GPU for {room.gpu_layers} (--gpu-layers)"
        if need > have:
            return f"{_layers(span)} need {gigabytes(need)} on {name}, which lends {gigabytes(have)}"
    return f"{_layers(stages[-1])} do not fit on {_name(inputs, stages[-1])} beside what it shares"


def _layers(span: Span) -> str:
    return f"layers {span.first}-{span.last - 1}" if span.last > span.first else "embedding and head"


def _name(inputs: PlanInputs, span: Span) -> str:
    node = inputs.snapshot.node(span.node)
    name = node.facts.name if node else span.node
    return f"{name} ({span.device})" if span.device else name
