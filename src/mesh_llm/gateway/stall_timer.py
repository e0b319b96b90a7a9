"""Notice that nothing has happened for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallTimer:
    """Calls `on_silence` once when nobody has called `heard` for `limit_s`.

    A timer set anew for each token costs as much as sending it on. This one sleeps through the
    whole limit, looks at what has happened meanwhile, and sleeps again for what is left of it.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """The limit counts from now on."""
        self.heard()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._look)

    def rest(self) -> None:
        """Silence is in order, until `watch` is called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        self._heard_s = self._loop.time()

    def _look(self) -> None:
        due_s = self._heard_s + self._limit_s
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self._timer = None
            self._on_silence()
