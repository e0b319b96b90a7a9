"""How fast a plan will be, before anybody has tried it. Pure.

One request at a time reads each stage's weights once per token, and crosses
each link once: `T = Σ bytes read / bandwidth + Σ hops`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mesh_llm.defaults import PROMPT_MICRO_BATCH, PROMPT_TOKENS, SPILL_BYTES_PER_S
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.memory_layout import Allocation
from mesh_llm.planning.model_speed import ModelSpeed
from mesh_llm.planning.plan_inputs import PathCost, PlanInputs, ground_of
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import ModelFacts, NodeId, Place, Prediction, Stage

LONG_PROMPT_TOKENS = 4096
"""Of the prompt that the engine's steps are made for: what an agent sends, or some pages of text."""


MEASURED_WITHIN = 0.25
USUAL_WITHIN = 0.6
"""How far predictions are off, nine times in ten: with the model's own types measured, and without."""

_F32_BYTES = 4
_FLOPS = 2
"""Of one token and one weight, or one element of a key or a value: a product and a sum."""

_LEAST_S = 1e-5
"""That a long prompt takes, whatever a node claims of its speed."""


def predict(
    model: ModelFacts,
    stages: Sequence[Stage],
    snapshot: Snapshot,
    *,
    host: NodeId,
    settings: CacheSettings,
    head_on_worker: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Prediction | None:
    """Of stages as they are in a plan; None where a speed is missing, or memory.

    `prompt_tokens`: of the prompt whose first token is asked about.
    """
    inputs = ground_of(snapshot, model, settings)
    spans = [Span(stage.node, stage.first, stage.last, stage.device) for stage in stages]
    if host not in inputs.rooms or not {span.place for span in spans} <= inputs.lent.keys():
        return None
    return prediction(inputs, host, spans, head_on_worker=head_on_worker, prompt_tokens=prompt_tokens)


def prediction(
    inputs: PlanInputs,
    host: NodeId,
    spans: Sequence[Span],
    *,
    head_on_worker: bool,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Prediction | None:
    token_s = token_seconds(inputs, host, spans, head_on_worker=head_on_worker, depth=prompt_tokens)
    allocations = inputs.allocations(host, spans, head_on_worker=head_on_worker)
    if token_s is None or allocations is None:
        return None
    prompt_s = _prompt_seconds(inputs, host, spans, allocations, prompt_tokens)
    long_s = _prompt_seconds(inputs, host, spans, allocations, LONG_PROMPT_TOKENS)
    within = _within(inputs, host, spans, head_on_worker=head_on_worker)
    return Prediction(
        tok_s=1 / token_s,
        first_token_s=prompt_s + (_head_seconds(inputs, host, spans, head_on_worker=head_on_worker) or 0.0),
        prompt_tok_s=LONG_PROMPT_TOKENS / max(long_s, _LEAST_S),
        tok_s_within=within,
        first_token_within=within,
    )


def _within(inputs: PlanInputs, host: NodeId, spans: Sequence[Span], *, head_on_worker: bool) -> float:
    """How far it may be off: more where a device was not measured with the model's own types."""
    places = {span.place for span in spans} | (set() if head_on_worker else {Place(host)})
    speeds = [inputs.speeds.get(place) for place in places]
    measured = all(speed is not None and speed.is_measured for speed in speeds)
    return MEASURED_WITHIN if measured else USUAL_WITHIN


def token_seconds(
    inputs: PlanInputs,
    host: NodeId,
    spans: Sequence[Span],
    *,
    head_on_worker: bool,
    delay_factor: float = 1.0,
    depth: int = PROMPT_TOKENS,
) -> float | None:
    """Between two tokens, after so many others; None where a speed is missing, or memory."""
    allocations = inputs.allocations(host, spans, head_on_worker=head_on_worker)
    seconds = _head_seconds(inputs, host, spans, head_on_worker=head_on_worker)
    if allocations is None or seconds is None:
        return None
    for span, allocation in zip(spans, allocations, strict=True):
        speed = inputs.speeds.get(span.place)
        if speed is None:
            return None
        seconds += stage_seconds(inputs, span, allocation, speed, host, depth)
    activation = _F32_BYTES * inputs.load.facts.hidden
    for way in _ways(inputs, host, spans):
        seconds += delay_factor * way.delay_s + way.overhead_s + activation / way.bytes_per_s
    return seconds


def _head_seconds(
    inputs: PlanInputs, host: NodeId, spans: Sequence[Span], *, head_on_worker: bool
) -> float | None:
    """To make one token's logits, and for them to come back; None where a speed is missing."""
    speed = inputs.speeds.get(spans[-1].place if head_on_worker else Place(host))
    if speed is None:
        return None
    seconds = inputs.load.head_bytes / speed.head_bytes_per_s
    if head_on_worker:
        more = _F32_BYTES * max(0, inputs.load.facts.vocabulary - inputs.load.facts.hidden)
        seconds += more / inputs.way(spans[-1].node, host, host).bytes_per_s
    return seconds


def solo_seconds(inputs: PlanInputs, host: NodeId) -> float | None:
    """The same of a node that has the whole model, at less expense: every node of a mesh is asked for it."""
    allocation, speed = inputs.whole_model(host), inputs.speeds.get(Place(host))
    if allocation is None or speed is None:
        return None
    span = Span(host, 0, inputs.load.count)
    head_s = inputs.load.head_bytes / speed.head_bytes_per_s
    return head_s + stage_seconds(inputs, span, allocation, speed, host)


def least_seconds(inputs: PlanInputs) -> float:
    """No plan is faster: all at the fastest rate that anybody has, and no links."""
    known = [speed for speed in inputs.speeds.values() if speed]
    head = max((speed.head_bytes_per_s for speed in known), default=math.inf)
    rate = max((speed.read_bytes_per_s for speed in known), default=math.inf)
    return inputs.load.head_bytes / head + inputs.load.active[-1] / rate


def stage_seconds(
    inputs: PlanInputs,
    span: Span,
    allocation: Allocation,
    speed: ModelSpeed,
    host: NodeId | None,
    depth: int = PROMPT_TOKENS,
) -> float:
    """For one token: weights, small operations, and attention to as many others."""
    load = inputs.load
    seconds = _read_seconds(inputs, span, allocation, speed, host)
    seconds += speed.operation_s * (load.operations[span.last] - load.operations[span.first])
    return seconds + load.cached_bytes(span.first, span.last, depth) / speed.cached_bytes_per_s


def _read_seconds(
    inputs: PlanInputs, span: Span, allocation: Allocation, speed: ModelSpeed, host: NodeId | None
) -> float:
    """That a stage takes for the weights of its layers."""
    active, rate = inputs.load.active, speed.read_bytes_per_s
    middle = span.last - allocation.on_gpu
    in_main = active[middle] - active[span.first]
    main_rate = min(rate, SPILL_BYTES_PER_S) if inputs.room(span.place, host=host).gpus else rate
    return in_main / main_rate + (active[span.last] - active[middle]) / rate


def _ways(inputs: PlanInputs, host: NodeId, spans: Sequence[Span]) -> list[PathCost]:
    """Every hop of a token: from the host through the workers, and back to it."""
    workers = [span.node for span in spans if span.node != host]
    return [inputs.way(a, b, host) for a, b in pairwise((host, *workers, host))] if workers else []


def _prompt_seconds(
    inputs: PlanInputs, host: NodeId, spans: Sequence[Span], allocations: Sequence[Allocation], tokens: int
) -> float:
    """A prompt's micro-batches follow each other through the stages: the slowest sets the pace.

    Stages on one device overlap, and together are no faster than all of it. A link is
    a stage, too: activations cross it while others are computed.
    """
    busy: list[float] = []
    devices: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span, allocation in zip(spans, allocations, strict=True):
        own, all_of_it = inputs.speeds[span.place], inputs.whole[span.place]
        room = inputs.room(span.place, host=host)
        spills = bool(room.gpus)
        assert own is not None  # or there would be no prediction
        # However short the prompt, every weight is read once.
        once_s = stage_seconds(inputs, span, allocation, own, host, 0)
        each_s = _prompt_token_seconds(inputs, span, allocation, own, tokens, spills=spills)
        busy.append(max(once_s, tokens * each_s))
        with_all = _prompt_token_seconds(inputs, span, allocation, all_of_it, tokens, spills=spills)
        devices[room.machine, span.device] += tokens * with_all / inputs.at_once[span.node]
    ways = _ways(inputs, host, spans)
    # Of what the last worker has only the prompt's last token goes back.
    activations = tokens * _F32_BYTES * inputs.load.facts.hidden
    busy += [activations / way.bytes_per_s for way in ways[:-1]]
    batches = -(-tokens // PROMPT_MICRO_BATCH) if ways else 1
    paced = (sum(busy) + (batches - 1) * max(*busy, *devices.values())) / batches
    return paced + sum(way.delay_s + way.overhead_s for way in ways)


def _prompt_token_seconds(
    inputs: PlanInputs,
    span: Span,
    allocation: Allocation,
    speed: ModelSpeed | None,
    tokens: int,
    *,
    spills: bool,
) -> float:
    """For each token of a prompt of so many; `spills`: what does not lie on a GPU would be faster there."""
    assert speed is not None  # or there would be no prediction
    load, middle = inputs.load, span.last - allocation.on_gpu
    # Layers that spill out of a GPU lose at prompts what they lose at reading.
    slower = 1.0
    if spills:
        slower = max(1.0, speed.read_bytes_per_s / SPILL_BYTES_PER_S)
    weights = slower * (load.elements[middle] - load.elements[span.first])
    weights += load.elements[span.last] - load.elements[middle]
    attended = slower * load.attention(span.first, middle, tokens)
    attended += load.attention(middle, span.last, tokens)
    small = load.facts.hidden * (load.operations[span.last] - load.operations[span.first])
    products = _FLOPS * (weights / speed.flops_per_s + attended / speed.attention_per_s)
    return products + small / speed.elements_per_s
