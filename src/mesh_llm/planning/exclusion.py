"""For every node without a part in a plan, the reason in a sentence. Pure."""

from __future__ import annotations

from mesh_llm.defaults import PLAN_SEARCH_STEPS
from mesh_llm.planning.cuts import too_many
from mesh_llm.planning.eligibility import split_refusal
from mesh_llm.planning.fit import gigabytes, layer_cache_bytes
from mesh_llm.planning.memory_layout import surely_holds_one
from mesh_llm.planning.placement import Layout, filled, layers_lent, seconds_of, spread_out, with_head
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.planning.proposal import Question
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import Exclusion, NodeId

SLOW_LINK_RTT_S = 0.01
"""Where a link rather than a device is to blame for a slow plan: networks at home stay below it."""


_COMPARED_NODES = 24
"""Up to so many each gets a plan of its own to compare with: a millisecond for each, with every decision."""
NOT_NEEDED = "not needed: the model fits on fewer nodes"
WAITING = "waiting: there is no plan yet"


def exclusions(asked: Question, inputs: PlanInputs, layout: Layout | None) -> tuple[Exclusion, ...]:
    """Of all nodes but those of the layout; without one, of all."""
    part = layout.nodes if layout else frozenset[NodeId]()
    outside = [node for node in asked.snapshot.nodes if node.id not in part]
    host = _host(asked, layout)
    return tuple(
        Exclusion(node=node.id, reason=_reason(asked, inputs, layout, host, node)) for node in outside
    )


def _reason(
    asked: Question, inputs: PlanInputs, layout: Layout | None, host: Candidate | None, node: Candidate
) -> str:
    if refused := asked.roster.refused.get(node.id):
        return refused
    if host and host.id != node.id:
        if refused := split_refusal(node, host):
            return refused
        if short := _too_small(inputs, node):
            return short
    if layout is None:
        return WAITING
    if asked.settings.layers is not None:
        return "--layers gives it no layers"
    if asked.settings.tensor_split is not None:
        return "--tensor-split gives it no share"
    if asked.settings.split and not layout.solo:
        if len(layout.spans) >= inputs.load.count:
            return f"not needed: the model has only {inputs.load.count} layers"
        if full := too_many(len(layout.spans), len(inputs.rooms[layout.host].gpus)):
            return full
        return "not enough memory beside the nodes that share its machine"
    return _slower(inputs, layout, node.id) or NOT_NEEDED


def _host(asked: Question, layout: Layout | None) -> Candidate | None:
    if layout:
        return asked.snapshot.node(layout.host)
    return next(iter(asked.elected()), None)


def _too_small(inputs: PlanInputs, node: Candidate) -> str:
    load = inputs.load
    rooms = [inputs.lent[place] for place in inputs.devices[node.id]]
    if any(surely_holds_one(room, load) for room in rooms) or layers_lent(inputs, node.id):
        return ""
    room = max(rooms, key=lambda room: room.total_bytes)
    least = min(layer.weight_bytes + layer_cache_bytes(layer, load.settings) for layer in load.facts.layers)
    need = gigabytes(least + load.worker_scratch_bytes)
    what = "the device that it lends" if len(rooms) == 1 else "the largest that it lends"
    where = f" on {room.gpus[0].name}, {what};" if room.gpus else ","
    return f"not enough memory: {gigabytes(room.total_bytes)} free{where} a layer needs {need}"


def _slower(inputs: PlanInputs, layout: Layout, node: NodeId) -> str:
    """What the plan would lose with this node, too; empty where it would lose nothing, or nobody can tell."""
    workers = layout.workers
    if len(inputs.rooms) > _COMPARED_NODES or len(workers) * len(inputs.rooms) > PLAN_SEARCH_STEPS:
        return ""
    now = seconds_of(inputs, layout)
    wider = [*workers, node]
    other = spread_out(inputs, layout.host, wider, quick=True)
    other = other or filled(inputs, layout.host, wider, quick=True)
    if now is None or other is None:
        return ""
    other = with_head(inputs, other)
    then = seconds_of(inputs, other)
    if then is None or _rate(then) == _rate(now) or then < now:
        return ""
    link = inputs.snapshot.link(layout.host, node)
    undelayed = seconds_of(inputs, other, delay_factor=0)
    if link and undelayed and link.rtt_s >= SLOW_LINK_RTT_S and then - undelayed > undelayed - now:
        delay = f"{link.rtt_s * 1e3:.0f} ms"
        return f"too slow a link: {delay} would make it {_rate(then)} instead of {_rate(now)} tok/s"
    return f"would make it slower: {_rate(then)} instead of {_rate(now)} tok/s"


def _rate(seconds: float) -> str:
    rate = 1 / seconds
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
