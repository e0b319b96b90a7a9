"""How many engines run one split plan at the same time. Pure.

One engine has one token of each answer under way, so only one stage computes at a time. Several engines
(lanes) over the same stages keep more of them busy: while one's tokens are at one stage, another's are at
the next. A single answer gains nothing by it, so lanes follow the demand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import LANES_LIMIT, ModelSettings
from mesh_llm.planning.placement import Layout
from mesh_llm.planning.plan_inputs import PlanInputs

STREAMS_PER_LANE = 2
"""At least: two answers in one engine cost little more than one, and a lane for each would gain nothing."""
LANES_MORE_S = 3.0
"""That requests ask for more lanes before one is started: its engine takes a second or more to load."""
LANES_FEWER_S = 60.0
"""That fewer would do before one ends: people pause, and come back."""

TAKE_TURNS = (
    "engines that share a GPU take turns on it without CUDA's multi-process service, so more lanes would be "
    "slower; --lanes N overrides this"
)


def lanes_for(settings: ModelSettings, inputs: PlanInputs, layout: Layout, demand: int) -> tuple[int, str]:
    """How many run, and why no more of them; `demand` counts where owners chose `auto` (0)."""
    if layout.solo or settings.lanes is None:
        return 1, ""
    wanted = settings.lanes or min(demand, len(layout.spans))
    if not settings.lanes and wanted > 1 and _take_turns(inputs, layout):
        return 1, TAKE_TURNS
    lanes = next(count for count in range(wanted, 0, -1) if count == 1 or _fit(inputs, layout, count))
    return lanes, "" if lanes == wanted else f"there is no memory for {wanted} lanes"


def _fit(inputs: PlanInputs, layout: Layout, lanes: int) -> bool:
    several = inputs.with_lanes(lanes)
    return several.allocations(layout.host, layout.spans, head_on_worker=layout.head_on_worker) is not None


def _take_turns(inputs: PlanInputs, layout: Layout) -> bool:
    """Whether several processes would share a GPU without CUDA's multi-process service.

    Each lane of a host is one, and each worker.
    """
    if not all(gpu.mps for gpu in inputs.rooms[layout.host].gpus):
        return True
    users: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for room in (inputs.room(span.place, host=layout.host) for span in layout.spans):
        for gpu in room.gpus:
            users[room.machine, gpu.name].append(gpu.mps)
    return any(len(served) > 1 and not all(served) for served in users.values())


@frozen
class LaneDemand:
    """How many lanes requests ask for: one more after some seconds, one fewer after a minute."""

    lanes: int = 1
    since: float | None = None
    """When requests began to ask for another number."""
    more: bool = False
    """For a higher one."""

    def after(self, *, streams: int, waiting: int, now: float) -> LaneDemand:
        """`streams`: answers under way; `waiting`: requests that wait for a slot."""
        right = min(LANES_LIMIT, max((streams + waiting) // STREAMS_PER_LANE, 2 if waiting else 1))
        if right == self.lanes:
            return LaneDemand(lanes=self.lanes)
        more = right > self.lanes
        if self.since is None or more != self.more:
            return LaneDemand(lanes=self.lanes, since=now, more=more)
        if now - self.since < (LANES_MORE_S if more else LANES_FEWER_S):
            return self
        return replace(self, lanes=self.lanes + (1 if more else -1), since=now)
