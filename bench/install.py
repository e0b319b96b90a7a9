"""From a fresh clone to the demo's first token: an empty home, nothing compiled, nothing in pip's cache."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.plan import Plan
from bench.report import Row, Side, plain_row
from bench.stats import at_most
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "From a clone to the first answer"

_ROOT = Path(__file__).parents[1]
_STEP_S = 1800.0
_FIRST_TOKEN_S = 120.0
"""What `make demo` may take on two quiet cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    wall_s: float
    cpu_s: float
    said: str


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rounds = plan.rounds(full=3, quick=1, full_s=300.0, quick_s=300.0)
    seen: dict[str, list[float]] = {"setup": [], "setup cpu": [], "token": [], "demo cpu": [], "both": []}
    for _ in rounds:
        with tempfile.TemporaryDirectory(prefix="bench-install-") as folder:
            await _round(Path(folder), seen)
    rows = [
        ("make setup", "setup", None),
        ("make setup, CPU time", "setup cpu", None),
        ("mesh-llm demo, until the first token", "token", None),
        ("mesh-llm demo --once, CPU time of all of it", "demo cpu", None),
        ("make demo, until the first token", "both", at_most(_FIRST_TOKEN_S)),
    ]
    return tuple(
        plain_row(what, Side(name="this commit", sample=Sample(tuple(seen[key])), unit="s"), target)
        for what, key, target in rows
    ), (
        rounds.note(),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "packages come from whatever index pip is set to; the default model from there, too",
    )


async def _round(folder: Path, seen: dict[str, list[float]]) -> None:
    clone, home = folder / "main", folder / "home"
    home.mkdir()
    await _step(["git", "clone", "-q", str(_ROOT), str(clone)], folder, home)
    setup = await _step(["make", "setup"], clone, home)
    demo = await _step([".venv/bin/mesh-llm", "demo", "--once", "--json"], clone, home)
    first_s = float(json.loads(demo.said)["first_token_s"])
    found = {"setup": setup.wall_s, "setup cpu": setup.cpu_s, "token": first_s, "demo cpu": demo.cpu_s}
    for key, value in (found | {"both": setup.wall_s + first_s}).items():
        seen[key].append(value)
    print(f"set-up {setup.wall_s:.0f} s, first token {first_s:.0f} s later", file=sys.stderr, flush=True)


async def _step(argv: list[str], folder: Path, home: Path) -> _Step:
    alone = ["/usr/bin/env", "-i", f"HOME={home}", f"PATH={os.environ['PATH']}"]
    before, began = _cpu_s(), time.monotonic()
    finished = await run([*alone, *argv], timeout_s=_STEP_S, cwd=folder)
    if finished.status != 0:
        raise MeshError(f"{argv[0]} failed: {' / '.join(finished.errors[-3:])}")
    return _Step(wall_s=time.monotonic() - began, cpu_s=_cpu_s() - before, said="\n".join(finished.output))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
