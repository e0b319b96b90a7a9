"""Which of a model's engines a request goes to, where there are several."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh_llm.gateway.upstream import EngineLoad, ModelServing, Upstream
from mesh_llm.gateway.warm_prefixes import Prompt, WarmPrefixes

LOADS_S = 1.0
"""Between two questions to other hosts how busy they are, while requests come."""
SHUN_S = 5.0
"""That an engine which broke off gets no new request, where there is another: its loss is noticed by then."""
_CHARS_PER_TOKEN = 4
_ANSWER_TOKENS = 128
"""Of a usual answer."""
_SHARED = 0.5
"""That an answer takes longer for each other one that is made beside it, as a share."""
_NO_LOAD = EngineLoad()


@dataclass(slots=True, kw_only=True)
class _Look:
    """When the hosts of one model were asked last."""

    at_s: float = -LOADS_S
    task: asyncio.Task[object] | None = None
    active: Counter[str] = field(default_factory=Counter)
    """Requests of this gateway then, by engine."""


class ReplicaChoice:
    """For all requests of one gateway."""

    def __init__(self, warm: WarmPrefixes, clock: Callable[[], float] = time.monotonic) -> None:
        self._warm = warm
        self._clock = clock
        self._active: Counter[str] = Counter()
        """Requests of this gateway, by engine."""
        self._looks: dict[str, _Look] = {}
        """By model."""
        self._failed_s: dict[str, float] = {}

    def close(self) -> None:
        for look in self._looks.values():
            if look.task is not None:
                look.task.cancel()

    async def picker(self, model: ModelServing, prompt: Prompt) -> Picker:
        """For one request. Others are asked for a prompt that continues what this gateway has not seen."""
        look = self._looks.setdefault(model.names[0], _Look())
        read = self._warm.sizes(prompt)
        if prompt.continues and 2 * max(read.values(), default=0) < prompt.size:
            told = await self._ask(model, prompt, look)
            read |= {url: prompt.size_of(digest) for url, digest in told.items() if digest}
        elif self._clock() - look.at_s >= LOADS_S and (look.task is None or look.task.done()):
            # Not waited for: the next request knows.
            look.task = asyncio.create_task(self._ask(model, Prompt(), look), name="loads of other engines")
        return Picker(self, prompt, read, look)

    async def _ask(self, model: ModelServing, prompt: Prompt, look: _Look) -> Mapping[str, str]:
        look.at_s = self._clock()
        told = await model.look(prompt.asked)
        look.active = self._active.copy()
        return told

    # -- for one request -----------------------------------------------------------------------

    def best(
        self, upstreams: Sequence[Upstream], prompt: Prompt, read: Mapping[str, int], look: _Look
    ) -> Upstream:
        """One that has most of the prompt and a free turn; else the one that is likely done first."""
        if len(upstreams) == 1:
            return upstreams[0]
        now = self._clock()
        well = [each for each in upstreams if now - self._failed_s.get(each.url, -SHUN_S) >= SHUN_S]
        upstreams = well or upstreams
        warm = [each for each in upstreams if 2 * read.get(each.url, 0) >= max(1, prompt.size)]
        busy = {each.url: self._busy(each, look) for each in upstreams}
        free = [each for each in warm if busy[each.url] < _load(each).slots]
        return min(
            free or upstreams,
            key=lambda each: _seconds(_load(each), busy[each.url], prompt.size - read.get(each.url, 0)),
        )

    def _busy(self, upstream: Upstream, look: _Look) -> int:
        """Turns that are taken or waited for, as far as this gateway knows."""
        load, active = _load(upstream), self._active[upstream.url]
        # One here tells what is; one elsewhere has told it a moment ago.
        since = 0 if upstream.connect is None else active - look.active[upstream.url]
        return max(active, load.taken + load.waiting + since)

    def begun(self, upstream: Upstream, prompt: Prompt) -> None:
        self._active[upstream.url] += 1
        self._warm.note(upstream.url, prompt)

    def ended(self, upstream: Upstream) -> None:
        self._active[upstream.url] -= 1
        if not self._active[upstream.url]:
            del self._active[upstream.url]

    def failed(self, upstream: Upstream) -> None:
        now = self._clock()
        self._failed_s = {url: at for url, at in self._failed_s.items() if now - at < SHUN_S}
        self._failed_s[upstream.url] = now
        self._warm.forget(upstream.url)


class Picker:
    """Of one request: at most one engine at a time has it."""

    def __init__(self, choice: ReplicaChoice, prompt: Prompt, read: Mapping[str, int], look: _Look) -> None:
        self._choice = choice
        self._prompt = prompt
        self._read = read
        self._look = look
        self._picked: Upstream | None = None

    def pick(self, upstreams: Sequence[Upstream]) -> Upstream:
        self.close()
        self._picked = self._choice.best(upstreams, self._prompt, self._read, self._look)
        self._choice.begun(self._picked, self._prompt)
        return self._picked

    def failed(self, upstream: Upstream) -> None:
        self._choice.failed(upstream)

    def close(self) -> None:
        if self._picked is not None:
            self._choice.ended(self._picked)
        self._picked = None


def _seconds(load: EngineLoad, busy: int, unread: int) -> float:
    """Until an engine with so many turns taken has made a usual answer to a prompt."""
    wait_s = max(0, busy - load.slots + 1) * load.turn_s / load.slots
    prompt_s = max(0, unread) / _CHARS_PER_TOKEN / load.prompt_tok_s
    return wait_s + prompt_s + _ANSWER_TOKENS / load.tok_s * (1 + _SHARED * min(busy, load.slots))


def _load(upstream: Upstream) -> EngineLoad:
    return upstream.load or _NO_LOAD
