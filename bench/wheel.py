"""CPU libraries of the wheel in dist/ (`make wheel`) against the one that was compiled on the spot."""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.plan import Plan
from bench.report import Row, Side, ratio_row
from bench.stats import at_least
from mesh_llm.bench.rounds import turns
from mesh_llm.engine import build, machine
from mesh_llm.engine.prebuilt import VARIANTS, Variant, suitable
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from mesh_llm.results.samples import Sample

TITLE = "Ready-made CPU libraries"

_DIST = Path(__file__).parents[1] / "dist"
_PROGRAM = Path(__file__).with_name("wheel_program.py")
_ROUND_S = 300.0
_BUILT = "built here"


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    mesh, native = (build.library(name) for name in build.STANDARD)
    if not (mesh.built and native.built):
        raise MeshError("there is no library that was compiled here", hint="mesh-llm engine build")
    with tempfile.TemporaryDirectory() as scratch:
        packed = _unpacked(Path(scratch), plan.choose(full=9, quick=2))
        libraries = {_BUILT: native.path, **packed}
        rounds = plan.rounds(full=5, quick=5, full_s=600.0, quick_s=200.0)
        seen: dict[str, dict[str, list[float]]] = {name: {"decode": [], "prompt": []} for name in libraries}
        for number in rounds:
            for name, path in turns(list(libraries.items()), number):
                for kind, figure in (await _figures({"mesh": mesh.path, "cpu": path})).items():
                    seen[name][kind].append(figure)
    best = next(iter(packed))
    rows = tuple(
        ratio_row(
            f"{kind}, {name}",
            (_side(name, seen[name][kind]), _side(_BUILT, seen[_BUILT][kind])),
            at_least(0.95) if (name, kind) == (best, "decode") else None,
        )
        for name in packed
        for kind in ("decode", "prompt")
    )
    untried = ", ".join(variant.name for variant in _variants() if variant.name not in _runnable())
    return rows, (
        rounds.note(),
        "tokens for each second of CPU time, one thread, 128 tokens decoded, prompts of 512, each run in a "
        "process of its own: on a busy machine wall time would measure the others",
        f"this processor gets {best}; the rest is what lesser ones would get, shown on this one",
        f"in the wheel, and beyond this processor: {untried or 'none'}",
    )


def _wheel() -> Path:
    found = sorted(_DIST.glob("*-py3-none-*linux*.whl"))
    if not found:
        raise MeshError(f"there is no wheel in {_DIST}", hint="make wheel")
    return found[-1]


def _variants() -> tuple[Variant, ...]:
    """Those in the wheel, the best first."""
    with zipfile.ZipFile(_wheel()) as wheel:
        names = {Path(name).stem.removeprefix("libggml-cpu-") for name in wheel.namelist()}
    return tuple(variant for family in VARIANTS.values() for variant in family if variant.name in names)


def _runnable() -> tuple[str, ...]:
    return suitable(_variants(), machine.cpu_features())


def _unpacked(folder: Path, most: int) -> dict[str, Path]:
    """The libraries that this processor can run, the best first, so many."""
    with zipfile.ZipFile(_wheel()) as wheel:
        return {
            name: Path(wheel.extract(f"mesh_llm/prebuilt/libggml-cpu-{name}.so", folder))
            for name in _runnable()[:most]
        }


async def _figures(libraries: dict[str, Path]) -> dict[str, float]:
    request = {
        "libraries": {name: str(path) for name, path in libraries.items()},
        "model": str(models_folder() / catalog.load().find("smollm2").files[0]),
        "prompt_tokens": 512,
        "tokens": 128,
    }
    finished = await run(
        [sys.executable, "-P", str(_PROGRAM)], stdin=json.dumps(request).encode() + b"\n", timeout_s=_ROUND_S
    )
    if finished.status != 0:
        raise MeshError(f"the engine ended with {finished.status}: {' '.join(finished.errors[-3:])}")
    figures: dict[str, float] = json.loads(finished.output[-1])
    return figures


def _side(name: str, values: list[float]) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="tok/CPU s")
