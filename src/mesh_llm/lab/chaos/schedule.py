"""Which faults happen when. The same seed gives the same faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from mesh_llm.frozen import frozen

NODES = ("one", "two", "three")
"""The first two are owners of their mesh."""
GUEST = "four"
"""Joins and leaves."""
REPLACED = "three"
"""Revoked now and then; another one joins by the same name."""
FIRST_S = 4.0
"""Before the first fault: clients have begun to ask."""
EVERY_S = 10.0
"""Between two faults, in the mean."""
_STRAY = (0.4, 1.6)
"""Of it, at least and at most."""
RECOVERY_S = 14.0
"""A node that was struck counts as struck for so long after that: it starts, and takes part again."""


@frozen
class FaultKind:
    """What can be done, and for how long."""

    text: str
    for_s: tuple[float, float] = (0.0, 0.0)
    takes_node: bool = True
    """The node cannot hold the model meanwhile."""
    nodes: tuple[str, ...] = NODES


KINDS: Mapping[str, FaultKind] = {
    "kill-node": FaultKind(text="a node is killed and started again", for_s=(1.0, 8.0)),
    "stop-node": FaultKind(text="a node's process stands still, its children go on", for_s=(2.0, 9.0)),
    "freeze-node": FaultKind(text="a node stands still with all its children", for_s=(2.0, 12.0)),
    "restart-node": FaultKind(text="a node is stopped as by Ctrl-C and started again", for_s=(0.5, 5.0)),
    "upgrade-node": FaultKind(
        text="a node is stopped and started as another version of the same code", for_s=(0.5, 3.0)
    ),
    "revoke-node": FaultKind(
        text="a node's invite is revoked; another node joins", for_s=(2.0, 6.0), nodes=(REPLACED,)
    ),
    "join-node": FaultKind(text="a fourth node joins, and leaves", for_s=(12.0, 25.0), nodes=(GUEST,)),
    "cut-node": FaultKind(text="a node hears and reaches nobody", for_s=(3.0, 15.0)),
    "slow-node": FaultKind(text="a node's links are slow", for_s=(4.0, 12.0), takes_node=False),
    "fill-disk": FaultKind(
        text="a node and its children cannot write files", for_s=(4.0, 12.0), takes_node=False
    ),
    "fill-memory": FaultKind(text="the children of a node get no more memory", for_s=(3.0, 8.0)),
    "jump-clock": FaultKind(text="a node's clock jumps", for_s=(4.0, 15.0), takes_node=False),
    "kill-engine": FaultKind(text="the engine is killed", takes_node=False),
    "stop-engine": FaultKind(text="the engine stands still", for_s=(1.0, 9.0), takes_node=False),
    "kill-worker": FaultKind(text="a worker's child is killed", takes_node=False),
    "stop-worker": FaultKind(text="a worker's child stands still", for_s=(1.0, 9.0), takes_node=False),
}
CLOCK_JUMPS_S = (-86400.0, -3600.0, 3600.0, 86400.0)
SLOW_S = (0.005, 0.03)
"""One way."""


@frozen
class Fault:
    at_s: float
    kind: str
    node: str
    """The engine's faults strike whoever hosts by then; this node's where it has one."""
    for_s: float = 0.0
    amount: float = 0.0
    """Of a jump or a delay, in seconds."""

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Fault:
        return cls(**{name: document[name] for name in ("at_s", "kind", "node", "for_s", "amount")})


def draw(
    *, seed: int, minutes: float, every_s: float = EVERY_S, kinds: Collection[str] = tuple(KINDS)
) -> tuple[Fault, ...]:
    """Faults that leave one node of the three untouched at any time: it can hold the model.

    Every kind comes once before any comes again, unless no node is free for it.
    """
    random = Random(seed)
    faults: list[Fault] = []
    bag: list[str] = []
    now_s, end_s = FIRST_S, 60.0 * minutes
    while now_s < end_s:
        if not bag:
            bag = sorted(kinds)
            random.shuffle(bag)
        fault = _fault(bag.pop(), now_s, faults, random)
        if fault is not None and fault.end_s <= end_s:
            faults.append(fault)
        now_s = round(now_s + every_s * random.uniform(*_STRAY), 2)
    return tuple(faults)


def _fault(kind: str, now_s: float, before: Sequence[Fault], random: Random) -> Fault | None:
    means = KINDS[kind]
    for_s = round(random.uniform(*means.for_s), 2)
    struck = {each.node for each in before if now_s < each.end_s + RECOVERY_S}
    down = {node for node in struck if node != GUEST and _is_down(node, now_s, before)}
    free = [node for node in means.nodes if node not in struck]
    if not free or (means.takes_node and len(down) + 1 >= len(NODES) and means.nodes != (GUEST,)):
        return None
    amount = 0.0
    if kind == "jump-clock":
        amount = random.choice(CLOCK_JUMPS_S)
    elif kind == "slow-node":
        amount = round(random.uniform(*SLOW_S), 4)
    return Fault(at_s=now_s, kind=kind, node=random.choice(free), for_s=for_s, amount=amount)


def _is_down(node: str, now_s: float, before: Sequence[Fault]) -> bool:
    return any(
        each.node == node and KINDS[each.kind].takes_node and now_s < each.end_s + RECOVERY_S
        for each in before
    )


def moved_up(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """The same faults without the time before the first of them."""
    if not faults:
        return ()
    early_s = faults[0].at_s - FIRST_S
    return tuple(
        Fault.from_document({**each.to_document(), "at_s": round(each.at_s - early_s, 2)}) for each in faults
    )
