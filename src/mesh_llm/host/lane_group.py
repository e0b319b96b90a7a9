"""The engines of one plan: started, watched and ended one by one, while the others serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from mesh_llm.defaults import ENGINE_SETTLED_S
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.engine.telemetry import Work
from mesh_llm.gateway.lanes import Lanes
from mesh_llm.host.lane import Lane
from mesh_llm.mesh_settings import LANES_LIMIT
from mesh_llm.peers.data_links import Link

LANE_POLL_S = 0.25
"""Between two looks at whether a lane that is to end has finished its answers."""
LANE_RETRY_FIRST_S = 1.0
LANE_RETRY_LAST_S = 300.0
"""Before a lane that failed is followed by another one; the others serve meanwhile."""

log = logging.getLogger(__name__)

OpenLinks = Callable[[AsyncExitStack], Awaitable[list[Link]]]
Specify = Callable[[Sequence[Link]], EngineSpec]


class LaneFailed(Exception):
    """The last lane that served, or was to."""

    def __init__(self, lane: Lane, error: BaseException) -> None:
        super().__init__(str(error))
        self.lane = lane
        self.error = error


class LaneGroup:
    """Lanes of one plan. A lane that dies is followed by another one; with the last of them the plan ends."""

    def __init__(
        self,
        *,
        slots: int,
        wanted: int,
        routed: bool,
        on_report: Callable[[Lane, EngineReport], None],
        on_change: Callable[[], None],
    ) -> None:
        """`slots`: of each. `routed`: their addresses stay, as those of engines with workers do."""
        self.all: list[Lane] = []
        """The oldest first."""
        self.turns = Lanes()
        """Which of them gets a request."""
        self._slots = slots
        self._wanted = wanted
        self._routed = routed
        self._on_report = on_report
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._past: deque[Lane] = deque(maxlen=LANES_LIMIT)
        """Those that have ended, for the sentence why."""
        self._pause_s = LANE_RETRY_FIRST_S
        self._not_before = 0.0
        self._key = ""

    # -- for others ----------------------------------------------------------------------------

    def want(self, lanes: int) -> None:
        """So many, from now on; answers of those that end finish first."""
        self._wanted = lanes
        self._changed.set()

    @property
    def first(self) -> Lane | None:
        """That answers, or is to."""
        return min(self.all, key=lambda lane: (lane.ends, not lane.is_ready), default=None)

    @property
    def slots(self) -> int:
        """Of all that answer."""
        return self._slots * max(1, len(self.turns.urls))

    def addresses(self) -> list[tuple[str, str]]:
        """URL and key of each that answers."""
        return [lane.address for lane in self._loaded()]

    async def why(self, port: int) -> str:
        """Why the engine on `port` broke off, once that is known."""
        lane = next((lane for lane in (*self.all, *reversed(self._past)) if lane.port == port), self.first)
        known = lane.supervisor if lane is not None else None
        return await known.why(port) if known is not None else "the engine was stopped"

    async def measure(self) -> tuple[dict[str, float], Work | None]:
        """Their series by name, added up, and what they have done; nothing where one is too busy to tell."""
        lanes = self._loaded()
        read = await asyncio.gather(*(lane.gauge.read(*lane.address) for lane in lanes))
        return _added(read), _together([lane.gauge.work for lane in lanes])

    def _loaded(self) -> list[Lane]:
        return [lane for lane in self.all if lane.report.state is EngineState.READY]

    # -- their life ----------------------------------------------------------------------------

    async def keep(self, open_links: OpenLinks, specify: Specify, log_file: Path) -> None:
        """As many as are wanted. Ends only with `LaneFailed`, or by being cancelled.

        `log_file`: the first one's; others have a number in its name.
        """
        try:
            while True:
                # One time for both: a pause that ended between them would be waited for without end.
                now = time.monotonic()
                self._fill(open_links, specify, log_file, now)
                await self._until_change(now)
                for lane in list(self.all):
                    self._look_at(lane)
        finally:
            tasks = [lane.task for lane in self.all if lane.task is not None]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _fill(self, open_links: OpenLinks, specify: Specify, log_file: Path, now: float) -> None:
        """One at a time: the next is started when the last one serves."""
        staying = [lane for lane in self.all if not lane.ends]
        if len(staying) > self._wanted:
            self._retire(staying[-1])
        elif len(staying) < self._wanted and all(lane.is_ready for lane in staying):
            ending = next((lane for lane in self.all if lane.ends and lane.is_ready), None)
            if ending is not None:
                ending.ends = False
                self.turns.reopen(ending.address[0])
                self._on_change()
            elif now >= self._not_before:
                self._start(open_links, specify, log_file)

    def _start(self, open_links: OpenLinks, specify: Specify, log_file: Path) -> None:
        number = next(n for n in count(1) if all(lane.number != n for lane in self.all))

        def specified(links: Sequence[Link]) -> tuple[EngineSpec, Path]:
            spec = specify(links)
            # One for all: a request reads the same to each.
            self._key = self._key or spec.key
            spec = replace(spec, key=self._key)
            if number == 1:
                return spec, log_file
            trace = f"{spec.trace}.{number}" if spec.trace else None
            return replace(spec, trace=trace), log_file.with_stem(f"{log_file.stem}-{number}")

        lane = Lane(number, open_links=open_links, specify=specified, on_report=self._on_report)
        self.all.append(lane)
        lane.task = asyncio.create_task(lane.live(self._on_ready), name=f"lane {number}")
        lane.task.add_done_callback(lambda _: self._changed.set())

    def _on_ready(self, lane: Lane) -> None:
        lane.ready_at = time.monotonic()
        if self._routed:
            self.turns.open(lane.address[0], slots=self._slots)
        self._on_change()
        self._changed.set()

    def _retire(self, lane: Lane) -> None:
        """Its answers finish first; one that has not served yet ends at once."""
        lane.ends = True
        if lane.is_ready:
            self.turns.close(lane.address[0])
            self._on_change()
        elif lane.task is not None:
            lane.task.cancel()
        self._changed.set()

    async def _until_change(self, now: float) -> None:
        wait_s = self._not_before - now
        if any(lane.ends for lane in self.all):
            wait_s = LANE_POLL_S
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if wait_s > 0 else None):
                await self._changed.wait()
        self._changed.clear()

    def _look_at(self, lane: Lane) -> None:
        assert lane.task is not None
        if lane.task.done():
            self._on_end(lane)
        elif lane.ends and lane.is_ready and not self.turns.taken(lane.address[0]):
            lane.task.cancel()

    def _on_end(self, lane: Lane) -> None:
        """The others go on."""
        assert lane.task is not None
        self.all.remove(lane)
        self._past.append(lane)
        self.turns.remove(lane.url)
        self._on_change()
        error = None if lane.task.cancelled() else lane.task.exception()
        if error is None:
            log.info("lane ended lane=%d", lane.number)
            return
        if not any(other.is_ready for other in self.all):
            raise LaneFailed(lane, error)
        log.warning("lane lost lane=%d: %s", lane.number, error)
        now = time.monotonic()
        if lane.served and now - lane.ready_at >= ENGINE_SETTLED_S:
            self._pause_s = LANE_RETRY_FIRST_S
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LANE_RETRY_LAST_S)


def _added(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in figures for name in each} if all(figures) else set()
    return {name: sum(each.get(name, 0.0) for each in figures) for name in names}


def _together(work: Sequence[Work | None]) -> Work | None:
    known = [each for each in work if each is not None]
    if not known or len(known) < len(work):
        return None
    return Work(
        generated=sum(each.generated for each in known),
        prompt=sum(each.prompt for each in known),
        processing=sum(each.processing for each in known),
    )
