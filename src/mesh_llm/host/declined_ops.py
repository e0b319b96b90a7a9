"""What is said of ops that a worker does not compute for its own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mesh_llm.types import DeclinedOp, NodeId, Stage

_FLASH_ATTENTION = "FLASH_ATTN_EXT"


def warnings(
    declined: Iterable[DeclinedOp], workers: Sequence[Stage], name_of: Callable[[NodeId], str]
) -> tuple[str, ...]:
    return tuple(_warning(op, workers, name_of) for op in declined)


def _warning(declined: DeclinedOp, workers: Sequence[Stage], name_of: Callable[[NodeId], str]) -> str:
    stage = workers[int(declined.link.removeprefix("MESH"))]
    who = name_of(stage.node) + (f" ({stage.device})" if stage.device else "")
    layers = "1 layer" if declined.layers == 1 else f"{declined.layers} layers"
    cost = f"the host does, in at least {2 * declined.layers} more hops for each token"
    if declined.op == _FLASH_ATTENTION:
        cost = "so the engine does without flash attention, on all nodes"
    return f"{who} does not compute {declined.op} ({declined.node}, {layers}): {cost}"
