"""How fast a plan will be, before anybody has tried it. Pure.

One request at a time reads each stage's weights once per token, and crosses
each link once: `T = Σ bytes read / bandwidth + Σ hops`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mesh_llm.defaults import PROMPT_MICRO_BATCH, PROMPT_TOKENS, SPILL_BYTES_PER_S
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.memory_layout import Allocation
from mesh_llm.planning.plan_inputs import PathCost, PlanInputs, ground_of
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import ModelFacts, NodeId, Place, Prediction, Speed, Stage

LONG_PROMPT_TOKENS = 4096
"""Of the prompt that the engine's steps are made for: what an agent sends, or some pages of text."""


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
    token_s = token_seconds(inputs, host, spans, head_on_worker=head_on_worker)
    allocations = inputs.allocations(host, spans, head_on_worker=head_on_worker)
    if token_s is None or allocations is None:
        return None
    prompt_s = _prompt_seconds(inputs, host, spans, allocations, prompt_tokens)
    long_s = _prompt_seconds(inputs, host, spans, allocations, LONG_PROMPT_TOKENS)
    return Prediction(
        tok_s=1 / token_s,
        first_token_s=prompt_s + token_s,
        prompt_tok_s=LONG_PROMPT_TOKENS / max(long_s, _LEAST_S),
    )


def token_seconds(
    inputs: PlanInputs,
    host: NodeId,
    spans: Sequence[Span],
    *,
    head_on_worker: bool,
    delay_factor: float = 1.0,
) -> float | None:
    """Between two tokens; None where a speed is missing, or memory."""
    allocations = inputs.allocations(host, spans, head_on_worker=head_on_worker)
    head_speed = inputs.speeds.get(spans[-1].place if head_on_worker else Place(host))
    if allocations is None or head_speed is None:
        return None
    seconds = inputs.load.head_bytes / head_speed.read_bytes_per_s
    for span, allocation in zip(spans, allocations, strict=True):
        speed = inputs.speeds.get(span.place)
        if speed is None:
            return None
        seconds += read_seconds(inputs, span, allocation, speed, host)
    activation = _F32_BYTES * inputs.load.facts.hidden
    for way in _ways(inputs, host, spans):
        seconds += delay_factor * way.delay_s + way.overhead_s + activation / way.bytes_per_s
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
    head_s = inputs.load.head_bytes / speed.read_bytes_per_s
    return head_s + read_seconds(inputs, span, allocation, speed, host)


def read_seconds(
    inputs: PlanInputs, span: Span, allocation: Allocation, speed: Speed, host: NodeId | None
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
        busy.append(tokens * _prompt_token_seconds(inputs, span, allocation, own, tokens, spills=spills))
        with_all = _prompt_token_seconds(inputs, span, allocation, all_of_it, tokens, spills=spills)
        devices[room.machine, span.device] += tokens * with_all
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
    speed: Speed | None,
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
    return _FLOPS * (weights / speed.flops_per_s + attended / speed.attention_per_s)
