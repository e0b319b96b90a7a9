"""What the figures depend on: commit, machine, engine, model."""

from __future__ import annotations

import shutil
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.bench.facts import TOOL_S, cpu_name, date, default_model, hardware, python, system
from mesh_llm.engine import build, machine
from mesh_llm.engine.inspect import describe, read_gguf
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.models.facts import model_facts

_ROOT = Path(__file__).parents[1]


async def gather() -> dict[str, str]:
    """Everything but the load, which each bench takes when it starts and when it ends."""
    model = await _model()
    libraries = _libraries()
    wheel = find_wheel()
    native = await describe(libraries)
    plain = await describe({})
    return {
        "commit": await _commit(),
        "date": date(),
        "hardware": hardware(await _cpu(native["devices"][0]["description"])),
        "system": system(),
        "python": python(),
        "mesh-llm": __version__,
        "engine": f"{wheel.version} (llama.cpp build {wheel.build_number}), {machine.threads()} threads",
        "native libraries": ", ".join(path.parent.name for path in libraries.values()),
        "native CPU code": " ".join(native["cpu_features"]),
        "plain wheel's CPU code": " ".join(plain["cpu_features"]),
        "model": model,
    }


async def _model() -> str:
    try:
        path = default_model()
    except MeshError:
        return "the default one is not here"  # nor does every bench need it
    facts = model_facts(await read_gguf(path))
    return (
        f"{path.name}, {facts.size_bytes / 1e6:.0f} MB, {len(facts.layers)} layers, "
        f"fingerprint {facts.fingerprint[:16]}"
    )


def _libraries() -> dict[str, Path]:
    built = build.at_hand()
    if built.missing:
        raise MeshError(
            f"not built on this machine: {', '.join(f'ggml-{name}' for name in built.missing)}",
            hint="mesh-llm engine build",
        )
    return built.libraries


async def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    head = await run([git, "rev-parse", "--short", "HEAD"], timeout_s=TOOL_S, cwd=_ROOT)
    if head.status != 0:
        return "unknown"
    # What a bench writes does not make the code another one.
    changes = await run(
        [git, "status", "--porcelain", "--", ".", ":!bench/results"], timeout_s=TOOL_S, cwd=_ROOT
    )
    return head.output[0] + ("-dirty" if changes.output else "")


async def _cpu(engine_says: str) -> str:
    """The engine reads /proc/cpuinfo, which on arm64 names no model."""
    return engine_says if engine_says != "CPU" else await cpu_name(engine_says)
