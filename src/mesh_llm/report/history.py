"""What the mesh has answered in the last minutes: a point every two seconds, kept by who hosts.

The host's points come from its engine, so they are of the whole mesh: tokens by the engine's
own count, requests by the queue in front of it. Other nodes ask the host while somebody
watches them, and put their own clients' time to the first token in its place, where there
is one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mesh_llm.console.event_feed import Feed
from mesh_llm.defaults import CONSOLE_SAMPLE_S, CONSOLE_SAMPLES
from mesh_llm.engine.telemetry import Work
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.report.view import NodeView
from mesh_llm.types import NodeId, SpeculationCounters

Sample = dict[str, float | None]

_FIELDS = ("tok_s", "prompt_tok_s", "first_token_ms", "active", "queued", "drafted", "accepted")
_HIGHEST = 1e12


class History:
    def __init__(
        self,
        view: NodeView,
        feed: Feed,
        first_tokens_s: Callable[[], list[float]],
        *,
        learn: Callable[[PlanRun], None] = lambda _: None,
    ) -> None:
        """`first_tokens_s`: what clients of this node waited for them, since it was last asked.

        `learn` hears of a plan that has something to do, at each point.
        """
        self._learn = learn
        self._view = view
        self._feed = feed
        self._first_tokens_s = first_tokens_s
        self._samples: deque[Sample] = deque(maxlen=CONSOLE_SAMPLES)
        self._of: PlanRun | None = None
        self._before: tuple[float, Work] | None = None
        """When the engine was last heard, and what it had done by then."""
        self._drafts_before = SpeculationCounters()
        self._busy = False
        self._token_s: float | None = None
        self._heard: tuple[NodeId, float] | None = None
        """The host whose points these are, and the time of its last one."""

    async def run(self) -> None:
        """Returns only by being cancelled."""
        while True:
            await asyncio.sleep(CONSOLE_SAMPLE_S)
            await self._step()

    def token_s(self, run: PlanRun) -> float | None:
        """Between two tokens of one answer, as last seen."""
        if run is self._of and self._token_s is not None:
            return self._token_s
        return 1 / run.rates.decode_tok_s if run.rates.decode_tok_s > 0 else None

    def since(self, time_s: object) -> list[Sample]:
        """Points after that time."""
        if not isinstance(time_s, int | float):
            return []
        return [sample for sample in self._samples if (sample["t"] or 0.0) > time_s]

    async def _step(self) -> None:
        run = self._view.hosting.serving
        published = self._view.mesh.serving()
        if run is not None and run.port is not None:
            self._heard = None
            self._add(await self._sample(run))
        elif published is None:
            self._add(self._point())
        elif self._feed.watchers:
            await self._follow(published[0])

    async def catch_up(self) -> None:
        """Before somebody begins to watch: where others host, only they know."""
        published = self._view.mesh.serving()
        if self._view.hosting.serving is None and published is not None:
            await self._follow(published[0])

    # -- the host's ----------------------------------------------------------------------------

    async def _sample(self, run: PlanRun) -> Sample:
        slot_queue = self._view.slot_queue
        if run is not self._of:
            self._of, self._before, self._token_s, self._busy = run, None, None, True
        active = slot_queue.taken
        busy, self._busy = active > 0 or self._busy, active > 0
        if not busy:
            # Nothing has happened, and nobody is asked about it.
            self._before = (time.monotonic(), self._before[1]) if self._before is not None else None
            return self._point(queued=slot_queue.waiting)
        (_, work), now = await run.lanes.measure(), time.monotonic()
        if work is None:
            return self._point(active=active, queued=slot_queue.waiting, tok_s=None, prompt_tok_s=None)
        point = self._point(active=active, queued=slot_queue.waiting) | self._drafts(run)
        if self._before is not None:
            then, before = self._before
            point |= _rates(before, work, now - then)
            self._token_s = _token_s(before, work, now - then) or self._token_s
            self._learn(run)
        self._before = (now, work)
        return point

    def _drafts(self, run: PlanRun) -> Sample:
        """Guesses since the last point, and those that were right."""
        before, after = self._drafts_before, run.speculation or SpeculationCounters()
        self._drafts_before = after
        return {
            "drafted": float(max(0, after.drafted - before.drafted)),
            "accepted": float(max(0, after.accepted - before.accepted)),
        }

    def _point(self, **known: float | None) -> Sample:
        point: Sample = {"t": round(time.time(), 1), **dict.fromkeys(_FIELDS, 0.0)}
        return {**point, "first_token_ms": self._first_token_ms(), **known}

    def _first_token_ms(self) -> float | None:
        waited_s = self._first_tokens_s()
        return round(1000 * sum(waited_s) / len(waited_s), 1) if waited_s else None

    def _add(self, sample: Sample) -> None:
        oldest = (sample["t"] or 0.0) - CONSOLE_SAMPLES * CONSOLE_SAMPLE_S
        # A node that was suspended, or whose host nobody watched, has points of long ago.
        while self._samples and (self._samples[0]["t"] or 0.0) < oldest:
            self._samples.popleft()
            self._feed.drop_oldest_sample()
        self._samples.append(sample)
        self._feed.sample(sample)

    # -- another's -----------------------------------------------------------------------------

    def _heard_of(self, host: NodeId) -> float:
        """The time of its last point that is here."""
        return self._heard[1] if self._heard is not None and self._heard[0] == host else 0.0

    async def _follow(self, host: NodeId) -> None:
        told = await self._view.remote_engine.samples(self._heard_of(host))
        # Again: those who begin to watch in the same moment ask for the same.
        since = self._heard_of(host)
        checked = [sample for entry in told[-CONSOLE_SAMPLES:] if (sample := _checked(entry)) is not None]
        samples = [sample for sample in checked if (sample["t"] or 0.0) > since]
        if not samples:
            return
        self._heard = (host, samples[-1]["t"] or 0.0)
        if (own := self._first_token_ms()) is not None:
            samples[-1]["first_token_ms"] = own
        if since:
            for sample in samples:
                self._add(sample)
            return
        # For as long as it has looked, it knows better; before that, what this node has seen stays.
        earlier = [own for own in self._samples if (own["t"] or 0.0) < (samples[0]["t"] or 0.0)]
        self._samples.clear()
        self._samples.extend([*earlier, *samples[:-1]])
        self._feed.begin_with(self._samples)
        self._add(samples[-1])


def _rates(before: Work, after: Work, seconds: float) -> Sample:
    """Sums start from nothing with a new engine."""
    return {
        "tok_s": round(max(0.0, after.generated - before.generated) / seconds, 2),
        "prompt_tok_s": round(max(0.0, after.prompt - before.prompt) / seconds, 2),
    }


def _token_s(before: Work, after: Work, seconds: float) -> float | None:
    """Of one answer; None unless all that went on in between was the same answers, getting longer."""
    same = before.processing == after.processing > 0 and before.prompt == after.prompt
    made = after.generated - before.generated
    return seconds * after.processing / made if same and made > after.processing else None


def _checked(entry: object) -> Sample | None:
    """A point as another node tells it: numbers, or nothing."""
    if not isinstance(entry, Mapping):
        return None
    fields = {name: _number(entry.get(name)) for name in ("t", *_FIELDS)}
    return fields if fields["t"] is not None else None


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared first: a whole number may be too large for any other look at it.
    return float(value) if known and 0 <= value < _HIGHEST else None
