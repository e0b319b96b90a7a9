"""Where a model may be cut, and into how many stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_llm.types import ModelFacts

MAX_DEVICES = 15
"""Of workers and the host's GPUs, in one plan: the engine's scheduler knows 16, one of which is the CPU."""


def joined_from(facts: ModelFacts) -> int:
    """The first of the layers that stay together; the number of layers where all may be parted."""
    return len(facts.layers) - (facts.joined_layers if facts.joined_layers > 1 else 0)


def may_split(facts: ModelFacts) -> bool:
    return facts.joined_layers < len(facts.layers)


def furthest_cut(facts: ModelFacts, reach: int, behind: int) -> int:
    """Where a range may end that could reach `reach`, if so many nodes behind it are to get a layer each."""
    count, joined = len(facts.layers), joined_from(facts)
    most = count - behind if joined == count or behind == 0 else joined + 1 - behind
    last = min(reach, most)
    return last if last <= joined or last == count else joined


def forbidden(facts: ModelFacts, cuts: Iterable[int]) -> str:
    """Why one of these cuts, each before the layer of that number, cannot be; empty where all can."""
    joined = joined_from(facts)
    if not may_split(facts):
        return f"a model of the architecture {facts.architecture} cannot be split"
    for cut in cuts:
        if joined < cut < len(facts.layers):
            last = len(facts.layers) - 1
            return (
                f"the model's layers {joined}-{last} share their caches and stay together; "
                f"it cannot be cut before layer {cut}"
            )
    return ""


def too_many(workers: int, own_gpus: int) -> str:
    """Why so many devices of workers cannot take part beside a host's GPUs; empty where they can."""
    if workers + own_gpus <= MAX_DEVICES:
        return ""
    return f"at most {MAX_DEVICES} devices can take part in a plan, the host's GPUs among them"
