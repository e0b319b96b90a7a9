"""Where a token's time goes: computing on each node, links, the rest; and what follows from it. Pure.

One token of one answer passes the host's layers, each worker's, the head and the sampler,
and every link between them, one after the other. Of that is measured

- the whole, between two tokens of an answer: the engine counts tokens, the clock does the rest;
- each worker's computing: the worker takes the time of each run (`compute_ns`). A run is a
  pass of the model through its layers, for all answers at once, and with a draft model for
  several tokens of each. Its `wait_ns` is the time from the end of one run to the beginning
  of the next: everything that happens elsewhere, and therefore no part of its own.

and derived

- links: half of the measured round trip for each hop, and what handling and sending take;
- the host's own layers and head: their bytes at the speed that was measured of its device.

What is left over is called so. Where measured parts do not fit into the whole (they are of
other seconds), they are made smaller to fit, derived ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

from mesh_llm.frozen import frozen
from mesh_llm.planning.layer_costs import active_bytes
from mesh_llm.planning.model_speed import model_speed, work_of
from mesh_llm.types import ModelFacts, NodeId, Plan, Speed

NOTHING_MEASURED = "nothing measured yet"
_CLEARLY_MORE = 1.5
"""Than its share of the layers: a node that takes so much of the computing is slower than the others."""


class PartKind(StrEnum):
    COMPUTE = "compute"
    WIRE = "wire"
    WAIT = "wait"
    """What is left over."""
    DRAFT = "draft"


@frozen
class TokenPart:
    kind: PartKind
    node: NodeId | None
    """Of a link: the worker that it leads to."""
    us: int


@frozen
class Measured:
    """Seconds of one pass through the model, but for `token_s`."""

    token_s: float
    """Between two tokens of one answer."""
    tokens_per_pass: float = 1.0
    """Above one with a draft model: all that a pass confirmed, and the one that it adds."""
    workers_s: Mapping[NodeId, float]
    """Computing, in the order of the stages."""
    links_s: Mapping[NodeId, float]
    host_s: float | None
    """Own layers and head; None where that is not known."""
    draft_s: float | None = None
    """Making guesses; None without a draft model, or where that is not known."""


@frozen
class TokenTime:
    total_us: int
    parts: tuple[TokenPart, ...]
    """Their sum is the total."""


def token_time(measured: Measured, *, host: NodeId) -> TokenTime:
    total = round(1e6 * measured.token_s)
    share = 1e6 / max(1.0, measured.tokens_per_pass)
    left = total
    workers, left = _fitted({node: share * s for node, s in measured.workers_s.items()}, left)
    draft, left = _fitted({host: share * (measured.draft_s or 0.0)}, left)
    links, left = _fitted({node: share * s for node, s in measured.links_s.items()}, left)
    # Alone there is nobody else who could have taken the time.
    own_us = left if not workers else min(left, round(share * (measured.host_s or 0.0)))
    parts = [TokenPart(kind=PartKind.DRAFT, node=host, us=draft[host])]
    parts.append(TokenPart(kind=PartKind.COMPUTE, node=host, us=own_us))
    for node in workers:
        parts.append(TokenPart(kind=PartKind.WIRE, node=node, us=links.get(node, 0)))
        parts.append(TokenPart(kind=PartKind.COMPUTE, node=node, us=workers[node]))
    parts.append(TokenPart(kind=PartKind.WAIT, node=None, us=left - own_us))
    return TokenTime(total_us=total, parts=tuple(part for part in parts if part.us > 0))


def _fitted(wanted: Mapping[NodeId, float], room: int) -> tuple[dict[NodeId, int], int]:
    """Whole microseconds, all made smaller alike where they are too many; and what they leave."""
    whole = sum(wanted.values())
    scale = min(1.0, room / whole) if whole > 0 else 0.0
    fitted = {}
    for node, us in wanted.items():
        fitted[node] = min(room, round(scale * us))
        room -= fitted[node]
    return fitted, room


def links_seconds(
    host: NodeId,
    workers: Sequence[NodeId],
    *,
    pushes: Callable[[NodeId], bool],
    hop_s: Callable[[NodeId, NodeId], float],
) -> dict[NodeId, float]:
    """By the worker that each hop leads to, the way back to the host by the one that it comes from.

    `pushes`: whether a worker sends straight to the next one; otherwise its result goes over the host.
    """
    seconds = dict.fromkeys(workers, 0.0)
    for node, following in pairwise((host, *workers)):
        if node == host or pushes(node):
            seconds[following] += hop_s(node, following)
        else:
            seconds[node] += hop_s(node, host)
            seconds[following] += hop_s(host, following)
    if workers:
        seconds[workers[-1]] += hop_s(workers[-1], host)
    return seconds


def host_seconds(model: ModelFacts, plan: Plan, speed: Speed | None) -> float | None:
    """What the host's own layers and the head take, by what was measured of its device."""
    if speed is None or not speed.read_bytes_per_s > 0:
        return None
    own_speed = model_speed(speed, work_of(model))
    largest = max(layer.weight_bytes for layer in model.layers)
    own = [stage for stage in plan.stages if stage.node == plan.host]
    layers = [layer for stage in own for layer in model.layers[stage.first : stage.last]]
    seconds = sum(active_bytes(model, layer, largest) for layer in layers) / own_speed.read_bytes_per_s
    if not plan.head_on_worker:
        seconds += (model.head_bytes or model.embedding_bytes) / own_speed.head_bytes_per_s
    return seconds


# -- what follows from it -----------------------------------------------------------------------


def sentence(
    token: TokenTime,
    *,
    host: NodeId,
    name: Callable[[NodeId], str],
    shares: Mapping[NodeId, float],
    drafts: bool,
) -> str:
    """What takes most, and what would help. `shares`: of the layers; `drafts`: a draft model is at work."""
    if not token.total_us:
        return NOTHING_MEASURED
    links = {part.node: part.us for part in token.parts if part.kind is PartKind.WIRE and part.node}
    others = [part for part in token.parts if part.kind is not PartKind.WIRE]
    most = max(others, key=lambda part: part.us, default=None)
    if most is None or sum(links.values()) > most.us:
        return _about_links(token, links, name=name, drafts=drafts)
    of_all = _of_all(most.us, token.total_us)
    match most.kind:
        case PartKind.DRAFT:
            return f"{of_all} is the draft model: a smaller one, or none, would help"
        case PartKind.WAIT:
            return f"{of_all} is neither computing nor links: the machines are busy with something else"
    assert most.node is not None
    if most.us == token.total_us:
        return f"all of {_milliseconds(token.total_us)} is computing on {name(most.node)}"
    if most.node == host:
        return f"{of_all} is the host's own part, on {name(host)}"
    computing = sum(part.us for part in others if part.kind is PartKind.COMPUTE)
    share = shares.get(most.node, 0.0)
    slow = most.us / computing > _CLEARLY_MORE * share
    advice = f", for {100 * share:.0f} % of the layers: fewer there would help" if slow else ""
    return f"{of_all} is computing on {name(most.node)}{advice}"


def _about_links(
    token: TokenTime, links: Mapping[NodeId, int], *, name: Callable[[NodeId], str], drafts: bool
) -> str:
    ranked = sorted(links, key=lambda node: -links[node])
    whole = sum(links.values())
    advice = "a shorter path would help" if drafts else "a draft model would help"
    if 2 * links[ranked[0]] > whole:
        return f"{_of_all(links[ranked[0]], token.total_us)} is the link to {name(ranked[0])}: {advice}"
    names = [name(node) for node in ranked]
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{_of_all(whole, token.total_us)} is the links to {listed}: {advice}"


def _of_all(us: int, total_us: int) -> str:
    return f"{100 * us / total_us:.0f} % of {_milliseconds(total_us)}"


def _milliseconds(us: int) -> str:
    return f"{us / 1000:.0f} ms" if us >= 9950 else f"{us / 1000:.1f} ms"
