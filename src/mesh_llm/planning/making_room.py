"""Which models have to go, so that another one fits: idle ones, and those of a lower priority. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.types import Fingerprint, Mode, Plan


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

    @property
    def takes_over(self) -> bool:
        """Whether models that are always loaded give way to it."""
        return any(each.gives_way for each in self.goes)

    @property
    def is_enough(self) -> bool:
        return self.plan.mode is not Mode.WAITING

    def told(self, plan: Plan) -> Plan:
        """`plan`, which waits, with the reason; with the figures of why nothing fits even then."""
        figures = plan if self.is_enough else self.plan
        return replace(plan, reason=self.reason, need_bytes=figures.need_bytes, have_bytes=figures.have_bytes)

    @property
    def reason(self) -> str:
        if not self.is_enough and self.kept_by:
            return f"{self.plan.reason}; it would fit without {' and '.join(self.kept_by)}"
        if not self.is_enough:
            return self.plan.reason
        if self.stays:
            names = " and ".join(each.name for each in self.stays)
            are = "is in use or was" if len(self.stays) == 1 else "are in use or were"
            return f"it waits for the memory of {names}, which {are} loaded a moment ago"
        names = " and ".join(each.name for each in self.goes)
        return f"{names} {'goes' if len(self.goes) == 1 else 'go'} to make room for it"


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


def kept_by(
    loaded: Sequence[Loaded], kept: Sequence[Loaded], plan_without: Callable[[Collection[Fingerprint]], Plan]
) -> tuple[str, ...]:
    """Those of `kept`, by name, without which it would fit: none, where it would not in any case."""
    room = make_room([*loaded, *kept], plan_without)
    return tuple(each.name for each in (*room.goes, *room.stays) if room.is_enough and each in kept)


def _least(goes: list[Loaded], plan: Plan, plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room:
    """Let those stay that need not go: the last ones in their order before any other."""
    for each in reversed(goes):
        fewer = [other for other in goes if other is not each]
        found = plan_without({other.fingerprint for other in fewer})
        if fewer and found.mode is not Mode.WAITING:
            goes, plan = fewer, found
    stays = tuple(each for each in goes if not each.may_go)
    return Room(plan=plan, goes=() if stays else tuple(goes), stays=stays)
