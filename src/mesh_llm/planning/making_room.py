"""Which models have to go or move, so that another one fits, and what that costs. Pure.

Idle ones go, and those of a lower priority give way: they are planned anew with what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.planning.fit import gigabytes
from mesh_llm.types import Fingerprint, Mode, NodeId, Plan, Stage

NameOf = Callable[[NodeId], str]

_NAMES_MOST = 3
"""Nodes that a sentence names; of more it tells the number."""


@frozen
class Loaded:
    """A model that was loaded on demand, or one that gives way."""

    fingerprint: Fingerprint
    name: str
    idle_since: int = 0
    """0: it must not go now, as it answers or has just been loaded."""
    priority: int = 0
    gives_way: bool = False
    """It is always loaded, and less important than the one that needs the memory: idle or not, it may go."""
    plans: tuple[Plan, ...] = ()
    """By which it has memory now."""
    then: tuple[Plan, ...] | None = None
    """By which it runs once it has given way: none, where it waits. None where nobody here knows."""

    @property
    def may_go(self) -> bool:
        return self.idle_since > 0 or self.gives_way

    @property
    def order(self) -> tuple[bool, bool, int, int, str]:
        """In which they go: idle ones, those that give way, those that answer; the least important first."""
        return not self.may_go, self.gives_way, self.priority, self.idle_since, self.fingerprint


@frozen
class Room:
    plan: Plan
    """What runs once these have gone; or why nothing does even then."""
    goes: tuple[Loaded, ...] = ()
    """They may go now."""
    stays: tuple[Loaded, ...] = ()
    """They may not go yet, and nothing fits as long as they stay."""
    kept_by: tuple[str, ...] = ()
    """Models that need not go, by name: without them, it would fit."""
    kept_bytes: int = 0
    """To read, were it loaded in their place."""

    @property
    def takes_over(self) -> bool:
        """Whether models that are always loaded give way to it."""
        return any(each.gives_way for each in self.goes)

    @property
    def is_enough(self) -> bool:
        return self.plan.mode is not Mode.WAITING

    def told(self, plan: Plan, name_of: NameOf) -> Plan:
        """`plan`, which waits, with the reason; with the figures of why nothing fits even then."""
        figures = plan if self.is_enough else self.plan
        reason = self.reason(name_of)
        return replace(plan, reason=reason, need_bytes=figures.need_bytes, have_bytes=figures.have_bytes)

    def reason(self, name_of: NameOf) -> str:
        """What it waits for, and at what price it is loaded."""
        if not self.is_enough and self.kept_by:
            others, price = " and ".join(self.kept_by), f"{gigabytes(self.kept_bytes)} to read then"
            return f"{self.plan.reason}; it would fit without {others}, {price}"
        if not self.is_enough:
            return self.plan.reason
        if self.stays:
            are = "is in use or was" if len(self.stays) == 1 else "are in use or were"
            waits = f"it waits for the memory of {_names(self.stays)}, which {are} loaded a moment ago"
            return f"{waits}; {_to_come_back(self.stays)}"
        return "; ".join(_sentences(self.goes, name_of))


def make_room(loaded: Sequence[Loaded], plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room:
    """The least important go first, of equals the least recently used, and no more than necessary.

    `plan_without`: the plan that there would be without these.
    """
    ordered = sorted(loaded, key=lambda each: each.order)
    idle = [each for each in ordered if each.idle_since]
    for goes in (idle, [each for each in ordered if each.may_go], ordered):
        plan = plan_without({each.fingerprint for each in goes})
        if plan.mode is not Mode.WAITING:
            return _least(goes, plan, plan_without)
    return Room(plan=plan)


def with_kept(
    room: Room,
    loaded: Sequence[Loaded],
    kept: Sequence[Loaded],
    plan_without: Callable[[Collection[Fingerprint]], Plan],
) -> Room:
    """`room`, which is not enough, with those of `kept` without which it would be, if there are any."""
    found = make_room([*loaded, *kept], plan_without)
    if not found.is_enough:
        return room
    names = tuple(each.name for each in (*found.goes, *found.stays) if each in kept)
    return replace(room, kept_by=names, kept_bytes=_weights([found.plan]))


def _least(goes: list[Loaded], plan: Plan, plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room:
    """Let those stay that need not go: the last ones in their order before any other."""
    for each in reversed(goes):
        fewer = [other for other in goes if other is not each]
        found = plan_without({other.fingerprint for other in fewer})
        if fewer and found.mode is not Mode.WAITING:
            goes, plan = fewer, found
    stays = tuple(each for each in goes if not each.may_go)
    return Room(plan=plan, goes=() if stays else tuple(goes), stays=stays)


# -- in words -------------------------------------------------------------------------------------


def move(before: Plan, plan: Plan, name_of: NameOf, *, room_for: str = "") -> str:
    """What a plan says of the one whose place it takes: what moved, for which model, and the price."""
    anew = before.nodes == plan.nodes
    moved = "loaded anew" if anew else f"moved from {_places(before.nodes, name_of)}"
    room = f" to make room for {room_for}" if room_for else ""
    unread = _unread([before], [plan])
    price = f"at the price of reading {gigabytes(unread)}" if unread else "with nothing new to read"
    return f"{moved}{room}, {price}"


def _sentences(goes: Sequence[Loaded], name_of: NameOf) -> Iterator[str]:
    """What becomes of them, and what has to be read for it."""
    moves = [each for each in goes if each.then]
    unknown = [each for each in goes if each.gives_way and each.then is None]
    ends = [each for each in goes if each not in (*moves, *unknown)]
    if ends:
        yield f"{_names(ends)} {_verb(ends, 'go', 'goes')} to make room for it; {_to_come_back(ends)}"
    for each in moves:
        yield _moves(each.name, each.plans, each.then or (), name_of)
    if unknown:
        again = gigabytes(_weights(plan for each in unknown for plan in each.plans))
        yield f"{_names(unknown)} {_verb(unknown, 'make', 'makes')} room for it; {again} to read again"


def _moves(name: str, before: Sequence[Plan], then: Sequence[Plan], name_of: NameOf) -> str:
    nodes = {node for plan in then for node in plan.nodes}
    if nodes == {node for plan in before for node in plan.nodes}:
        how = f"is loaded anew with {then[0].context} tokens of context"
    else:
        how = f"moves to {_places(nodes, name_of)}"
    unread = _unread(before, then)
    price = f"{gigabytes(unread)} to read there" if unread else "nothing new to read"
    return f"{name} {how} to make room for it; {price}"


def _to_come_back(models: Sequence[Loaded]) -> str:
    again = gigabytes(_weights(plan for each in models for plan in each.plans))
    return f"{again} to read again when {_verb(models, 'they come', 'it comes')} back"


def _names(models: Iterable[Loaded]) -> str:
    return " and ".join(each.name for each in models)


def _verb(models: Sequence[Loaded], several: str, one: str) -> str:
    return one if len(models) == 1 else several


def _places(nodes: Collection[NodeId], name_of: NameOf) -> str:
    names = sorted(map(name_of, nodes))
    if len(names) > _NAMES_MOST:
        return f"{len(names)} nodes"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _weights(plans: Iterable[Plan]) -> int:
    return sum(stage.weight_bytes for plan in plans for stage in plan.stages)


def _unread(before: Sequence[Plan], then: Iterable[Plan]) -> int:
    """Bytes of layers that nodes compute then and have not loaded yet."""
    return sum(_unread_of(stage, before) for plan in then for stage in plan.stages)


def _unread_of(stage: Stage, before: Iterable[Plan]) -> int:
    had = [each for plan in before for each in plan.stages if each.node == stage.node]
    loaded = sum(max(0, min(each.last, stage.last) - max(each.first, stage.first)) for each in had)
    count = max(1, stage.last - stage.first)
    return stage.weight_bytes * max(0, count - loaded) // count
