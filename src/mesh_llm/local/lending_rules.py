"""When a machine is lent: by its user's terms and by what it tells of itself. Takes time as an argument."""

from __future__ import annotations

from mesh_llm.config import LendTerms
from mesh_llm.frozen import frozen
from mesh_llm.local.machine_use import MachineUse

IDLE_S = 300.0
"""Without a key or a movement: whoever reads a page for longer is rarely slowed down by a neighbour."""
CALM_S = 60.0
"""That nothing speaks against lending before it begins again: loading a model costs others, too."""


def why_not(terms: LendTerms, use: MachineUse, minute: int) -> str:
    """Why nothing is to be lent now; empty: it may be. `minute`: of the day, as clocks here show it."""
    if terms.hours and not any(_holds(span, minute) for span in terms.hours):
        return f"it lends at {LendTerms(hours=terms.hours).text} only"
    if not terms.idle:
        return ""
    if use.idle_s is not None and use.idle_s < IDLE_S:
        return "somebody uses the machine"
    if use.on_battery:
        return "the machine runs on battery"
    if use.heat:
        return f"the machine is hot: {use.heat}"
    return f"{use.gpu_user} uses the GPU" if use.gpu_user else ""


def _holds(span: tuple[int, int], minute: int) -> bool:
    first, last = span
    return first <= minute < last if first < last else minute >= first or minute < last


@frozen
class LendingState:
    """What has been decided, and since when the opposite holds."""

    paused: str = ""
    calm_since: float | None = None
    """Since nothing speaks against lending, while it is paused."""
    overruled: bool = False
    """Its user lends all the same, until the reason is gone."""


def decided(state: LendingState, refusal: str, *, now: float) -> LendingState:
    """A reason pauses at once; lending begins again after a while without one."""
    if refusal:
        return LendingState(paused="" if state.overruled else refusal, overruled=state.overruled)
    if not state.paused:
        return LendingState()
    since = state.calm_since if state.calm_since is not None else now
    return LendingState() if now - since >= CALM_S else LendingState(paused=state.paused, calm_since=since)
