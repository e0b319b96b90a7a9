"""Which engine to ask, and which one after that."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from mesh_llm.defaults import GATEWAY_EXPLAIN_S
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.engine_connection import EngineError, EngineLost
from mesh_llm.gateway.replica_choice import Picker
from mesh_llm.gateway.upstream import ModelServing, Upstream
from mesh_llm.types import State

GATEWAY_RESUME_TRIES = 4
"""Engines that die of the same request without a word of an answer: it is the request, then."""
GATEWAY_LOOK_S = 0.02
"""Between two looks for the next engine. Asking costs a microsecond, and depends on all that a node knows."""
GATEWAY_GAP_S = 5.0
"""A request is held where a node that serves has nothing to serve with: a successor is being learned of."""
GATEWAY_LOAD_S = 300.0
"""That a request waits for a model on demand, where its client does not say: the largest take minutes."""
GATEWAY_LOAD_DOUBT_S = 2.0
"""That a request goes on waiting for a model that seems not to fit: nodes come and go."""
GATEWAY_SAME_ENGINE_S = 0.5
"""Before an engine that broke off is asked again, as long as the node believes in it."""
GATEWAY_SHORT_WHY_S = 0.1
"""To learn why an engine was lost, while the next one could go on."""


log = logging.getLogger(__name__)


class EngineUntried(EngineLost):
    """It was not asked for the answer: its time was too short, or another one has taken its place."""


async def is_given_up(serving: ModelServing, upstream: Upstream, *, within_s: float) -> bool:
    """Whether the node has no such engine any more, soon after it complained."""
    deadline = time.monotonic() + within_s
    while upstream in serving.upstreams():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(GATEWAY_LOOK_S)
    return True


async def until_serving(
    serving: ModelServing,
    *,
    patience_s: float | None = None,
    loads: bool = False,
    on_wait: Callable[[str], Awaitable[None]] | None = None,
) -> Sequence[Upstream]:
    """Engines to ask; raises the `Failure` when there are none after the client's patience.

    From one plan to the next a node that serves may have nothing to serve with for a moment, as
    long as it takes to hear of the successor. Nobody has to know.

    `loads`: the request is a reason to load the model, and waits for it. `on_wait`: told what for.
    """
    began_s = time.monotonic()
    loading_s = began_s - GATEWAY_LOAD_DOUBT_S
    while not (upstreams := serving.upstreams()):
        health, now_s = serving.health(), time.monotonic()
        if loads:
            serving.want()
            loading_s = now_s if health.loads else loading_s
        limit_s = max(patience_s or 0.0, GATEWAY_GAP_S if health.state is State.SERVING else 0.0)
        if patience_s is None and now_s - loading_s < GATEWAY_LOAD_DOUBT_S:
            limit_s = GATEWAY_LOAD_S
        if now_s - began_s >= limit_s:
            raise api_errors.not_serving(health)
        if on_wait is not None:
            await on_wait(health.reason)
        await asyncio.sleep(GATEWAY_LOOK_S)
    return upstreams


class EngineChoice:
    """For one request: engines one after the other, until one has answered it, or the time is up.

    The time counts from the first loss after which the client has heard nothing new, over all tries:
    if each one began it anew, engines that die in silence would keep a client waiting for many times
    as long. An engine that says something gives the next loss all the time again.
    """

    def __init__(
        self,
        serving: ModelServing,
        *,
        limit_s: float,
        picker: Picker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`picker`: chooses among several."""
        self._serving = serving
        self._picker = picker
        self._limit_s = limit_s
        self._clock = clock
        self._last: Upstream | None = None
        """The one that failed last."""
        self._last_s = 0.0
        self._since_s = 0.0
        self._is_lost = False
        """An engine was asked, and broke off; nothing new has been told since."""
        self._why: asyncio.Task[str] | None = None
        self._in_vain: list[Upstream] = []
        """Those lost in a row for which the request may be to blame."""
        self._has_others = False
        """Another engine stood ready when the last one failed."""
        self.count = 0
        """Engines that have failed so far."""

    async def __aenter__(self) -> EngineChoice:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._picker is not None:
            self._picker.close()
        if self._why is not None:
            self._why.cancel()
            await asyncio.wait((self._why,))

    @property
    def left_s(self) -> float | None:
        """For the next engine to begin with the request; None as long as none was lost."""
        return max(0.0, self._limit_s - (self._clock() - self._since_s)) if self._is_lost else None

    def _pick(self, upstreams: Sequence[Upstream]) -> Upstream:
        return upstreams[0] if self._picker is None else self._picker.pick(upstreams)

    async def next(self) -> Upstream:
        """The engine to ask now; raises the `Failure` when there is none, or none comes in time."""
        if self._last is None:
            return self._pick(await until_serving(self._serving))
        if len(self._in_vain) >= GATEWAY_RESUME_TRIES:
            why = await self.why()
            # Unless it has turned out that one was lost with a node.
            self._forgive()
            if len(self._in_vain) >= GATEWAY_RESUME_TRIES:
                raise api_errors.engine_lost(why)
        while True:
            now_s = self._clock()
            if now_s - self._since_s >= self._limit_s:
                why = await self.why()
                raise api_errors.not_resumed(f"{why}; no other engine served within {self._limit_s:.0f} s")
            upstreams = self._serving.upstreams()
            # The way to it may have broken, and not the engine itself: it gets a moment to turn out which.
            if now_s - self._last_s < GATEWAY_SAME_ENGINE_S or len(upstreams) > 1:
                upstreams = [each for each in upstreams if each != self._last]
            if upstreams:
                return self._pick(upstreams)
            self._serving.want()
            await asyncio.sleep(GATEWAY_LOOK_S)

    def failed(self, upstream: Upstream, error: EngineError, *, told: bool) -> None:
        """`upstream` did not finish the answer; `told`: it has said something new before."""
        self.count += 1
        if self._picker is not None and not isinstance(error, EngineUntried):
            self._picker.failed(upstream)
        self._has_others = len(self._serving.upstreams()) > 1
        asked, upstream = upstream, error.engine or upstream
        self._last, self._last_s = upstream, self._clock()
        if told:
            self._in_vain, self._is_lost = [], False
        if not self._is_lost:
            self._since_s = self._last_s
        if isinstance(error, EngineUntried):
            log.info("engine not asked url=%s: %s", upstream.url, error)
            if self._why is not None:
                return  # the loss before it is the reason
        else:
            self._is_lost = True
            self._in_vain += [] if told else [asked]
        if self._why is not None:
            self._why.cancel()
        self._why = asyncio.create_task(self._explain(upstream, error), name="why the engine was lost")

    async def why(self) -> str:
        """The sentence why the last one failed."""
        return await self._why if self._why is not None else ""

    async def why_in_short(self) -> str:
        """The same, but not for long where another engine stood ready: the answer goes on."""
        if self._why is None or self._last is None or not self._has_others:
            return await self.why()
        done, _ = await asyncio.wait((self._why,), timeout=GATEWAY_SHORT_WHY_S)
        return await self._why if done else f"the engine of {self._last.served_by or 'this node'} was lost"

    async def _explain(self, upstream: Upstream, error: EngineError) -> str:
        try:
            async with asyncio.timeout(GATEWAY_EXPLAIN_S):
                why = await self._serving.engine_failure(upstream)
        except TimeoutError:
            why = "the engine closed the connection"
        self._forgive()
        log.warning("engine lost url=%s error=%r why=%s", upstream.url, error, why)
        return why

    def _forgive(self) -> None:
        self._in_vain = [each for each in self._in_vain if not each.lost_node()]
