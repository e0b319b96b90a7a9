"""What a device can do with the model at hand: its types of weights, its sizes, its attention. Pure.

A device publishes what it measured of the kernels of the mesh's model. Of a kernel that it has not
measured, the nearest one of that kind counts, and where there is none, what was measured of a usual model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from mesh_llm.defaults import KERNELS_LIMIT
from mesh_llm.frozen import frozen
from mesh_llm.types import Kernel, KernelSpeed, Matrices, ModelFacts, Speed

ATTENTION, OPERATION = "attention", "op"
LEAST_RATE = 1e6
"""In bytes, or operations, a second: below it is no computer, and a prediction that is no number."""

_F32_BYTES = 4
_NO_WEIGHTS = {"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"}
"""Types that nothing is quantised to: the engine ends the process that tries."""


@frozen
class ModelSpeed:
    read_bytes_per_s: float
    """Of the weights of its layers, together."""
    head_bytes_per_s: float
    flops_per_s: float
    attention_per_s: float
    cached_bytes_per_s: float = math.inf
    """Of keys and values, by the attention of one token."""
    operation_s: float = 0.0
    """Each small one takes, for one token: starting it is most of that."""
    elements_per_s: float = math.inf
    """Small operations for the many tokens of a prompt."""
    is_measured: bool = False
    """With the model's own types; else with those of a usual one."""


@frozen
class ModelWork:
    """What a token of a model takes, summed up by kernels."""

    layers: tuple[Matrices, ...]
    head: Matrices | None
    attention: Kernel | None
    operation: Kernel


def work_of(model: ModelFacts) -> ModelWork:
    sums: dict[Kernel, Matrices] = {}
    for layer in model.layers:
        for each in layer.weights:
            before = sums.get(each.kernel)
            sums[each.kernel] = each if before is None else _sum(before, each)
    return ModelWork(
        layers=tuple(sorted(sums.values(), key=lambda each: (-each.bytes, _order(each.kernel)))),
        head=model.head,
        attention=attention_of(model),
        operation=Kernel(kind=OPERATION, width=model.hidden),
    )


def kernels_of(model: ModelFacts) -> tuple[Kernel, ...]:
    """What a device should measure for a model, the most important first."""
    work = work_of(model)
    if not work.layers:
        return ()
    found = [work.operation]
    found += [work.attention] if work.attention is not None else []
    found += [work.head.kernel] if work.head is not None else []
    found += [each.kernel for each in work.layers]
    return tuple(dict.fromkeys(each for each in found if each.kind not in _NO_WEIGHTS))[:KERNELS_LIMIT]


def attention_of(model: ModelFacts) -> Kernel | None:
    """Of its first layer that keeps keys; None where that is no usual attention, or none at all."""
    cached = next((layer.cache for layer in model.layers if layer.cache.k_width), None)
    if cached is None or not model.heads or model.query_elements % (2 * model.heads):
        return None
    width = model.query_elements // (2 * model.heads)
    heads, rest = divmod(cached.k_width, width) if width else (0, 1)
    if rest or not heads or cached.v_width != cached.k_width or model.heads % heads:
        return None
    return Kernel(kind=ATTENTION, width=width, rows=heads, used=model.heads)


@lru_cache(maxsize=1024)
def model_speed(speed: Speed, work: ModelWork) -> ModelSpeed:
    """What is known of a device, for one model: asked for every device, again with each plan."""
    usual = ModelSpeed(
        read_bytes_per_s=speed.read_bytes_per_s,
        head_bytes_per_s=speed.read_bytes_per_s,
        flops_per_s=speed.flops_per_s,
        attention_per_s=speed.attention_per_s,
    )
    known = {
        each.kernel: each
        for each in speed.kernels
        if _is_rate(each.read_bytes_per_s) and _is_rate(each.flops_per_s)
    }
    found = [nearest(known, each.kernel) for each in work.layers]
    if not any(found):
        return usual
    head = nearest(known, work.head.kernel) if work.head is not None else None
    attention = nearest(known, work.attention) if work.attention is not None else None
    operation = nearest(known, work.operation)
    read_s = flops_s = 0.0
    for each, seen in zip(work.layers, found, strict=True):
        read_s += each.bytes / (seen.read_bytes_per_s if seen else speed.read_bytes_per_s)
        flops_s += each.elements / (seen.flops_per_s if seen else speed.flops_per_s)
    own = replace(
        usual,
        read_bytes_per_s=sum(each.bytes for each in work.layers) / read_s,
        flops_per_s=sum(each.elements for each in work.layers) / flops_s,
        is_measured=all(found),
    )
    if head is not None:
        own = replace(own, head_bytes_per_s=head.read_bytes_per_s)
    if attention is not None:
        own = replace(
            own, attention_per_s=attention.flops_per_s, cached_bytes_per_s=attention.read_bytes_per_s
        )
    if operation is not None:
        operation_s = _F32_BYTES * operation.kernel.width / operation.read_bytes_per_s
        own = replace(own, operation_s=operation_s, elements_per_s=operation.flops_per_s)
    return own


def nearest(known: Mapping[Kernel, KernelSpeed], kernel: Kernel) -> KernelSpeed | None:
    """Of that kind, and a mixture's only for a mixture's."""
    if kernel in known:
        return known[kernel]
    alike = [
        each
        for each in known.values()
        if each.kernel.kind == kernel.kind and (each.kernel.experts > 1) == (kernel.experts > 1)
    ]
    return min(alike, key=lambda each: (_distance(each.kernel, kernel), _order(each.kernel)), default=None)


def _distance(one: Kernel, other: Kernel) -> float:
    sizes = zip(_order(one)[1:], _order(other)[1:], strict=True)
    return sum(abs(math.log(max(1, a) / max(1, b))) for a, b in sizes)


def _order(kernel: Kernel) -> tuple[str, int, int, int, int]:
    return kernel.kind, kernel.width, kernel.rows, kernel.experts, kernel.used


def _sum(one: Matrices, other: Matrices) -> Matrices:
    return Matrices(kernel=one.kernel, bytes=one.bytes + other.bytes, elements=one.elements + other.elements)


def _is_rate(figure: float) -> bool:
    return LEAST_RATE <= figure < math.inf
