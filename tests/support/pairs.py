"""A host and a lite client that has joined it: one API, reached in two ways."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.joining import JoiningNode, lab
from tests.support.lone_engine import LoneEngine, lone_engine

START_S = 60.0
"""For a node to serve on a machine that others use, too; it takes three seconds on a quiet one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    host: JoiningNode
    client: JoiningNode
    model: str
    """The name that it is served under."""

    def busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in self.host.ask("/slots").json())


class Pairs:
    """Those that one test after the other uses, and an engine alone; each starts when first asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[tuple[str, ...], Pair] = {}
        self._engine: LoneEngine | None = None

    def get(self, model: Path, *options: str) -> Pair:
        key = (str(model), *options)
        if key not in self._running:
            self._running[key] = self._start(model, *options)
        return self._running[key]

    def _start(self, model: Path, *options: str) -> Pair:
        nodes = self._stack.enter_context(lab(model))
        host = nodes.start("host", "--model", model, *options).until_ready(within_s=START_S)
        token = host.token(role="client")
        client = nodes.start("client", "--join", token, "--client").until_ready(within_s=START_S)
        return Pair(host=host, client=client, model=model.stem)

    def engine(self, model: Path, libraries: dict[str, Path], **settings: Any) -> LoneEngine:
        if self._engine is None:
            self._engine = self._stack.enter_context(lone_engine(model, libraries, **settings))
        return self._engine

    def end(self) -> None:
        self._running.clear()
        self._engine = None
        self._stack.close()
