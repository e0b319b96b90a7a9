"""From a clone, and from a wheel, to the demo's first token: empty home and cache, nothing compiled."""

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
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "From a clone to the first answer"

_ROOT = Path(__file__).parents[1]
_STEP_S = 1800.0
_DEMO = ("demo", "--once", "--json")
_FROM_CLONE = "make demo, until the first token"
_DOWNLOAD = "wheel: the model's download"
_FROM_WHEEL = "wheel: both, from the installation to the first token"
_TARGETS = {_FROM_CLONE: at_most(120.0), _DOWNLOAD: at_most(45.0), _FROM_WHEEL: at_most(60.0)}
"""Seconds on two quiet cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    wall_s: float
    cpu_s: float
    said: str

    @property
    def first_token_s(self) -> float:
        """That a demo has told."""
        return float(json.loads(self.said)["first_token_s"])


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rounds = plan.rounds(full=3, quick=1, full_s=300.0, quick_s=300.0)
    seen: dict[str, list[float]] = {}
    for _ in rounds:
        with tempfile.TemporaryDirectory(prefix="bench-install-") as folder:
            found = await _clone(Path(folder)) | await _wheel(Path(folder))
        for what, seconds in found.items():
            seen.setdefault(what, []).append(seconds)
    return tuple(
        plain_row(what, Side(name="this commit", sample=Sample(tuple(values)), unit="s"), _TARGETS.get(what))
        for what, values in seen.items()
    ), (
        rounds.note(),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "packages come from whatever index pip is set to; the default model from there, too",
        "of the wheel: the newest in dist/ (make wheel); none there, no rows",
    )


async def _clone(folder: Path) -> dict[str, float]:
    clone, home = folder / "main", folder / "home"
    home.mkdir()
    await _step(["git", "clone", "-q", str(_ROOT), str(clone)], folder, home)
    setup = await _step(["make", "setup"], clone, home)
    demo = await _step([".venv/bin/mesh-llm", *_DEMO], clone, home)
    first_s = demo.first_token_s
    print(f"set-up {setup.wall_s:.0f} s, first token {first_s:.0f} s later", file=sys.stderr, flush=True)
    return {
        "make setup": setup.wall_s,
        "make setup, CPU time": setup.cpu_s,
        "mesh-llm demo, until the first token": first_s,
        "mesh-llm demo --once, CPU time of all of it": demo.cpu_s,
        _FROM_CLONE: setup.wall_s + first_s,
    }


async def _wheel(folder: Path) -> dict[str, float]:
    """An empty home once more; what is compiled already came in the wheel."""
    wheels = sorted((_ROOT / "dist").glob("mesh_llm-*.whl"))
    if not wheels:
        return {}
    home, place = folder / "another home", folder / "environment"
    home.mkdir()
    await _step([sys.executable, "-m", "venv", str(place)], folder, home)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", f"{wheels[-1]}[engine]"]
    install = await _step(pip, folder, home)
    model = await _step([str(place / "bin" / "mesh-llm"), "download", DEFAULT_MODEL], folder, home)
    demo = await _step([str(place / "bin" / "mesh-llm"), *_DEMO], folder, home)
    return {
        "wheel: pip install": install.wall_s,
        _DOWNLOAD: model.wall_s,
        "wheel: mesh-llm demo with the model, until the first token": demo.first_token_s,
        _FROM_WHEEL: model.wall_s + demo.first_token_s,
    }


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
