"""What a node says: to the person at its terminal, to its log, and to whoever watches its console."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesh_llm.agents import snippets
from mesh_llm.agents.config_files import Endpoint, as_typed
from mesh_llm.config import NodeConfig
from mesh_llm.console.event_feed import Feed
from mesh_llm.home import Home, default_home
from mesh_llm.sanitise import line
from mesh_llm.types import Event, EventSink, NodeId, Progress, ProgressSink

NEWS_LINES = 5
"""At once: who joins a mesh of a hundred nodes does not want to read all their names."""
REMARK_AGAIN_S = 10.0
"""Before the same is noted again: a client that is refused comes back many times a second."""


log = logging.getLogger(__name__)

_NOT_NEWS = ("agent", "invite")
"""Kinds that the page shows elsewhere, or on demand only: commands to copy, and secrets."""


_SEVERAL_LINES = ("build",)
"""Kinds in which nobody else has a say: a compiler's last words stay lines."""


class Announcements:
    def __init__(self, tell: EventSink, progress: ProgressSink, feed: Feed) -> None:
        self._tell = tell
        self._progress = progress
        self._feed = feed
        self._said: dict[str, str] = {}
        self._remarked: dict[str, float] = {}

    def say(self, kind: str, text: str, *, once: bool = False, secret: bool = False) -> None:
        """A line of the run. `once`: not the same again; `secret`: for the terminal only."""
        if once and self._said.get(kind) == text:
            return
        self._said[kind] = text
        if secret:
            self._tell(Event(kind=kind, text=text))
            return
        log.info("%s: %s", kind, line(text))
        self.tell(Event(kind=kind, text=text))

    def tell(self, event: Event) -> None:
        flat = replace(event, text=line(event.text))
        parts = event.text.splitlines() if event.kind in _SEVERAL_LINES else ()
        self._tell(replace(event, text="\n".join(map(line, parts))) if len(parts) > 1 else flat)
        if not event.kind.startswith(_NOT_NEWS):
            self._feed.event(flat)

    def note(self, event: Event) -> None:
        """Worth knowing for one who watches the whole, and no line of this node's run."""
        event = replace(event, text=line(event.text))
        log.info("%s: %s", event.kind, event.text)
        self._feed.event(event)

    def news(self, events: Sequence[Event], *, quietly: bool = False) -> None:
        """Of the mesh: lines at the terminal, too; one line for all where many come at once."""
        for event in events:
            self.note(event)
        shown = [] if quietly else events
        if len(shown) > NEWS_LINES:
            text = f"{len(events)} changes in the mesh; mesh-llm status shows who is here"
            shown = [replace(events[0], text=text)]
        for event in shown:
            self._tell(replace(event, text=line(event.text)))

    def remark(self, kind: str, text: str) -> None:
        """The same, of what may happen many times a second."""
        now = time.monotonic()
        if now - self._remarked.get(kind, -REMARK_AGAIN_S) >= REMARK_AGAIN_S:
            self._remarked[kind] = now
            self.note(Event(kind=kind, text=text))

    def refused(self, node: NodeId, reason: str) -> None:
        self.remark("refused", f"A node that wanted to join ({node[:8]}) was refused: {reason}")

    def api(self, model: str, url: str, *, config: NodeConfig) -> None:
        """Where the API is; once for each address and model."""
        lines = api_lines(
            model, url, key_needed=config.api_key is not None, write_pi=pi_writer(Home(config.home).path)
        )
        for kind, text in lines.items():
            self.say(kind, text, once=True)

    def progress(self, step: Progress) -> None:
        self._feed.progress(step)
        self._progress(step)


def pi_writer(home: Path) -> str:
    """By which a person at this node's terminal reaches it."""
    command = ["mesh-llm"] if shutil.which("mesh-llm") else [sys.executable, "-m", "mesh_llm"]
    named = [] if home == default_home().absolute() else ["--home", str(home)]
    return shlex.join([*command, "agent", "pi", "--write", *named])


def api_lines(model: str, url: str, *, key_needed: bool, write_pi: str) -> dict[str, str]:
    """By the kind of event: where the API is, and how agents use it.

    `write_pi`: the command that tells pi where that is.
    """
    endpoint = Endpoint(url=as_typed(url), model=model, key_needed=key_needed)
    pi, goose = snippets.lines_at_start(endpoint, write_pi)
    return {"api": f"API ready at {endpoint.url}", "agent": pi, "agent-goose": goose}
