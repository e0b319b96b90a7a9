"""Which models that were loaded on demand have to go, so that another one fits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mesh_llm.frozen import frozen
from mesh_llm.types import Fingerprint, Mode, Plan


@frozen
class Loaded:
    """A model that was loaded on demand."""

    fingerprint: Fingerprint
    name: str
    idle_since: int = 0
    """0: it must not go now, as it answers or has just been loaded."""


@frozen
class Room:
    plan: Plan
    """What runs once these have gone; or why nothing does even then."""
    goes: tuple[Loaded, ...] = ()
    """They may go now."""
    stays: tuple[Loaded, ...] = ()
    """They may not go yet, and nothing fits as long as they stay."""

    @property
    def is_enough(self) -> bool:
        return self.plan.mode is not Mode.WAITING

    @property
    def reason(self) -> str:
        if not self.is_enough:
            return self.plan.reason
        if self.stays:
            names = " and ".join(each.name for each in self.stays)
            are = "is in use or was" if len(self.stays) == 1 else "are in use or were"
            return f"it waits for the memory of {names}, which {are} loaded a moment ago"
        names = " and ".join(each.name for each in self.goes)
        return f"{names} {'goes' if len(self.goes) == 1 else 'go'} to make room for it"


def make_room(loaded: Sequence[Loaded], plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room:
    """The least recently used go first, and no more of them than necessary.

    `plan_without`: the plan that there would be without these.
    """
    idle = sorted(
        (each for each in loaded if each.idle_since), key=lambda each: (each.idle_since, each.fingerprint)
    )
    for goes in (idle, list(loaded)):
        plan = plan_without({each.fingerprint for each in goes})
        if plan.mode is not Mode.WAITING:
            return _least(goes, plan, plan_without)
    return Room(plan=plan)


def _least(goes: list[Loaded], plan: Plan, plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room:
    """Let those stay that need not go, the most recently used first; one that answers before any other."""
    for each in sorted(goes, key=lambda each: (not each.idle_since, each.idle_since), reverse=True):
        fewer = [other for other in goes if other is not each]
        found = plan_without({other.fingerprint for other in fewer})
        if fewer and found.mode is not Mode.WAITING:
            goes, plan = fewer, found
    stays = tuple(each for each in goes if not each.idle_since)
    return Room(plan=plan, goes=() if stays else tuple(goes), stays=stays)
