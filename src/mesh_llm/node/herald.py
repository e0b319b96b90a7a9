"""What a node says: to the person at its terminal, to its log, and to whoever watches its console."""

from __future__ import annotations

import logging

from mesh_llm.console.feed import Feed
from mesh_llm.types import Event, EventSink, Progress, ProgressSink

log = logging.getLogger(__name__)

_NOT_NEWS = ("agent", "invite")
"""Kinds that the page shows elsewhere, or on demand only: commands to copy, and secrets."""


class Herald:
    def __init__(self, tell: EventSink, progress: ProgressSink, feed: Feed) -> None:
        self._tell = tell
        self._progress = progress
        self._feed = feed
        self._said: dict[str, str] = {}

    def say(self, kind: str, text: str, *, once: bool = False, secret: bool = False) -> None:
        """A line of the run. `once`: not the same again; `secret`: for the terminal only."""
        if once and self._said.get(kind) == text:
            return
        self._said[kind] = text
        if secret:
            self._tell(Event(kind=kind, text=text))
            return
        log.info("%s: %s", kind, text)
        self.tell(Event(kind=kind, text=text))

    def tell(self, event: Event) -> None:
        self._tell(event)
        if not event.kind.startswith(_NOT_NEWS):
            self._feed.event(event)

    def note(self, kind: str, text: str) -> None:
        """Worth knowing for one who watches the whole, and no line of this node's run."""
        log.info("%s: %s", kind, text)
        self._feed.event(Event(kind=kind, text=text))

    def progress(self, step: Progress) -> None:
        self._feed.progress(step)
        self._progress(step)
