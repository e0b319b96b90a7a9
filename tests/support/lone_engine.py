"""The engine child as a node starts it, with a key that the test knows: what the API has to equal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from mesh_llm.engine.spec import EngineSpec
from tests.support.node import WAIT_S, Reply, ask
from tests.support.waiting import STRETCH

KEY = "known-to-the-test"


class LoneEngine:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._authority = f"127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> Reply:
        with closing(HTTPConnection(self._authority, timeout=STRETCH * WAIT_S)) as connection:
            return ask(connection, path, body, headers={"Authorization": f"Bearer {KEY}"})


@contextmanager
def lone_engine(
    model: Path, libraries: dict[str, Path], *, changes: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[LoneEngine]:
    """With one thread and one slot of 2048 tokens, as a small node's; `changes`: of the spec."""
    usual = EngineSpec(
        model=str(model),
        alias=model.stem,
        context=2048,
        slots=1,
        threads=1,
        key=KEY,
        libraries={name: str(path) for name, path in libraries.items()},
        settings=settings,
    )
    spec = replace(usual, **(changes or {}))
    child = subprocess.Popen(
        [sys.executable, "-m", "mesh_llm.engine.children.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(spec.to_line())
        child.stdin.flush()
        try:
            report = json.loads(child.stdout.readline())
            assert report["event"] == "ready", report
            yield LoneEngine(report["port"])
        finally:
            # It also goes by itself, with its stdin.
            child.kill()
