"""What one token reads of a layer's tensors, by their types and sizes, and how much else it takes. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mesh_llm.frozen import frozen
from mesh_llm.types import Kernel, Matrices

_EXPERTS = re.compile(r"_exps\.")
_LOOKED_UP = "token_embd.weight"
_OF_A_NORM = 2
"""Operations: the norm, and the factor."""
_OF_A_LAYER = 7
"""Two rotations, two writes to the cache, two sums, and the gate of its feed-forward."""
_OF_A_MIXTURE = 6
"""The choice of experts and their shares, beside a sum for each that is chosen."""


@frozen
class Tensor:
    name: str
    kind: str
    shape: tuple[int, ...]
    """GGUF's order: the row length first."""
    size_bytes: int

    @property
    def is_matrix(self) -> bool:
        return math.prod(self.shape[1:]) > 1 and self.shape[0] > 0


def layer_weights(tensors: Sequence[Tensor], experts_used: int) -> tuple[Matrices, ...]:
    """Its matrices, those of equal type and size together."""
    found: dict[Kernel, Matrices] = {}
    for tensor in tensors:
        if not tensor.is_matrix or not tensor.name.endswith(".weight"):
            continue
        each = _weights(tensor, experts_used)
        before = found.get(each.kernel)
        found[each.kernel] = each if before is None else _sum(before, each)
    return tuple(found.values())


def head_weights(tensors: Sequence[Tensor]) -> Matrices | None:
    """Of the matrix that makes logits; where there is none, it is the embedding."""
    named = {tensor.name: tensor for tensor in tensors if tensor.is_matrix}
    head = named.get("output.weight") or named.get(_LOOKED_UP)
    return _weights(head, 0) if head is not None else None


def operations(tensors: Sequence[Tensor], experts_used: int) -> int:
    """About so many, beside products and attention."""
    single = [tensor.name for tensor in tensors if not tensor.is_matrix]
    norms = sum(name.endswith(".weight") for name in single)
    mixed = any(_EXPERTS.search(tensor.name) for tensor in tensors)
    count = _OF_A_LAYER + _OF_A_NORM * norms + len(single) - norms
    return count + (_OF_A_MIXTURE + experts_used if mixed else 0)


def _weights(tensor: Tensor, experts_used: int) -> Matrices:
    width, rows, *others = tensor.shape
    experts = math.prod(others) if _EXPERTS.search(tensor.name) else 1
    used = min(max(1, experts_used), experts)
    kernel = Kernel(
        kind=tensor.kind, width=width, rows=rows * math.prod(others) // experts, experts=experts, used=used
    )
    share = used / experts
    return Matrices(kernel=kernel, bytes=share * tensor.size_bytes, elements=share * math.prod(tensor.shape))


def _sum(one: Matrices, other: Matrices) -> Matrices:
    return Matrices(kernel=one.kernel, bytes=one.bytes + other.bytes, elements=one.elements + other.elements)
