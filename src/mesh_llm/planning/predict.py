"""How fast a plan will be, before anybody has tried it. Pure.

One request at a time reads each stage's weights once per token, and crosses
each link once: `T = Σ bytes read / bandwidth + Σ hops`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mesh_llm.defaults import LONG_PROMPT_TOKENS, PROMPT_MICRO_BATCH, PROMPT_TOKENS, SPILL_BYTES_PER_S
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.memory_layout import Lodging
from mesh_llm.planning.plan_inputs import Ground, Way, ground_of
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import ModelFacts, NodeId, Prediction, Speed, Stage

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
    ground = ground_of(snapshot, model, settings)
    spans = [Span(stage.node, stage.first, stage.last) for stage in stages]
    if not {host, *(span.node for span in spans)} <= ground.rooms.keys():
        return None
    return prediction(ground, host, spans, head_on_worker=head_on_worker, prompt_tokens=prompt_tokens)


def prediction(
    ground: Ground,
    host: NodeId,
    spans: Sequence[Span],
    *,
    head_on_worker: bool,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Prediction | None:
    token_s = token_seconds(ground, host, spans, head_on_worker=head_on_worker)
    lodgings = ground.lodgings(host, spans, head_on_worker=head_on_worker)
    if token_s is None or lodgings is None:
        return None
    prompt_s = _prompt_seconds(ground, host, spans, lodgings, prompt_tokens)
    long_s = _prompt_seconds(ground, host, spans, lodgings, LONG_PROMPT_TOKENS)
    return Prediction(
        tok_s=1 / token_s,
        first_token_s=prompt_s + token_s,
        prompt_tok_s=LONG_PROMPT_TOKENS / max(long_s, _LEAST_S),
    )


def token_seconds(
    ground: Ground,
    host: NodeId,
    spans: Sequence[Span],
    *,
    head_on_worker: bool,
    delay_factor: float = 1.0,
) -> float | None:
    """Between two tokens; None where a speed is missing, or memory."""
    lodgings = ground.lodgings(host, spans, head_on_worker=head_on_worker)
    head_speed = ground.speeds.get(spans[-1].node if head_on_worker else host)
    if lodgings is None or head_speed is None:
        return None
    seconds = ground.load.head_bytes / head_speed.read_bytes_per_s
    for span, lodging in zip(spans, lodgings, strict=True):
        speed = ground.speeds.get(span.node)
        if speed is None:
            return None
        seconds += _read_seconds(ground, span, lodging, speed)
    activation = _F32_BYTES * ground.load.facts.hidden
    for way in _ways(ground, host, spans):
        seconds += delay_factor * way.delay_s + way.overhead_s + activation / way.bytes_per_s
    if head_on_worker:
        more = _F32_BYTES * max(0, ground.load.facts.vocabulary - ground.load.facts.hidden)
        seconds += more / ground.way(spans[-1].node, host, host).bytes_per_s
    return seconds


def _read_seconds(ground: Ground, span: Span, lodging: Lodging, speed: Speed) -> float:
    active, rate = ground.load.active, speed.read_bytes_per_s
    middle = span.last - lodging.on_gpu
    in_main = active[middle] - active[span.first]
    main_rate = min(rate, SPILL_BYTES_PER_S) if ground.rooms[span.node].gpus else rate
    return in_main / main_rate + (active[span.last] - active[middle]) / rate


def _ways(ground: Ground, host: NodeId, spans: Sequence[Span]) -> list[Way]:
    """Every hop of a token: from the host through the workers, and back to it."""
    stops = [host, *(span.node for span in spans if span.node != host), host]
    return [ground.way(a, b, host) for a, b in pairwise(stops) if a != b]


def _prompt_seconds(
    ground: Ground, host: NodeId, spans: Sequence[Span], lodgings: Sequence[Lodging], tokens: int
) -> float:
    """A prompt's micro-batches follow each other through the stages: the slowest sets the pace.

    Stages on one machine overlap, and together are no faster than all of it. A link is
    a stage, too: activations cross it while others are computed.
    """
    busy: list[float] = []
    machines: defaultdict[str, float] = defaultdict(float)
    for span, lodging in zip(spans, lodgings, strict=True):
        own, all_of_it = ground.speeds[span.node], ground.whole[span.node]
        busy.append(tokens * _prompt_token_seconds(ground, span, lodging, own, tokens))
        with_all = tokens * _prompt_token_seconds(ground, span, lodging, all_of_it, tokens)
        machines[ground.rooms[span.node].machine] += with_all
    ways = _ways(ground, host, spans)
    # Of what the last worker has only the prompt's last token goes back.
    activations = tokens * _F32_BYTES * ground.load.facts.hidden
    busy += [activations / way.bytes_per_s for way in ways[:-1]]
    batches = -(-tokens // PROMPT_MICRO_BATCH) if ways else 1
    paced = (sum(busy) + (batches - 1) * max(*busy, *machines.values())) / batches
    return paced + sum(way.delay_s + way.overhead_s for way in ways)


def _prompt_token_seconds(
    ground: Ground, span: Span, lodging: Lodging, speed: Speed | None, tokens: int
) -> float:
    """For each token of a prompt of so many."""
    assert speed is not None  # or there would be no prediction
    load, middle = ground.load, span.last - lodging.on_gpu
    # Layers that spill out of a GPU lose at prompts what they lose at reading.
    slower = 1.0
    if ground.rooms[span.node].gpus:
        slower = max(1.0, speed.read_bytes_per_s / SPILL_BYTES_PER_S)
    weights = slower * (load.elements[middle] - load.elements[span.first])
    weights += load.elements[span.last] - load.elements[middle]
    attended = slower * load.attention(span.first, middle, tokens)
    attended += load.attention(middle, span.last, tokens)
    return _FLOPS * (weights / speed.flops_per_s + attended / speed.attention_per_s)
