"""What the figures depend on: commit, machine, engine, model."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.engine import build, machine
from mesh_llm.engine.inspect import describe, read_gguf
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from mesh_llm.models.facts import model_facts

_ROOT = Path(__file__).parents[1]
_TOOL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Others' work on this machine, as the kernel averages it over 1, 5 and 15 minutes."""

    averages: tuple[float, float, float]

    @classmethod
    def now(cls) -> Load:
        return cls(averages=os.getloadavg())

    def text(self) -> str:
        return " ".join(f"{average:.2f}" for average in self.averages)


async def gather() -> dict[str, str]:
    """Everything but the load, which each bench takes when it starts and when it ends."""
    model = await _model()
    libraries = _libraries()
    wheel = find_wheel()
    native = await describe(libraries)
    plain = await describe({})
    return {
        "commit": await _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": f"{await _cpu(native['devices'][0]['description'])}, {os.cpu_count()} cores, "
        f"{machine.total_memory() / 2**30:.0f} GiB",
        "system": f"{_system()}, {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "mesh-llm": __version__,
        "engine": f"{wheel.version} (llama.cpp build {wheel.build_number}), {machine.threads()} threads",
        "native libraries": ", ".join(path.parent.name for path in libraries.values()),
        "native CPU code": " ".join(native["cpu_features"]),
        "plain wheel's CPU code": " ".join(plain["cpu_features"]),
        "model": model,
    }


def default_model() -> Path:
    """Where it is; a bench fetches nothing."""
    entry = catalog.load().find(DEFAULT_MODEL)
    path = models_folder() / entry.files[0]
    if not path.is_file():
        raise MeshError(
            f"the default model, {entry.name}, is not on this machine", hint=f"mesh-llm download {entry.name}"
        )
    return path


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
    head = await run([git, "rev-parse", "--short", "HEAD"], timeout_s=_TOOL_S, cwd=_ROOT)
    if head.status != 0:
        return "unknown"
    # What a bench writes does not make the code another one.
    changes = await run(
        [git, "status", "--porcelain", "--", ".", ":!bench/results"], timeout_s=_TOOL_S, cwd=_ROOT
    )
    return head.output[0] + ("-dirty" if changes.output else "")


async def _cpu(engine_says: str) -> str:
    """The engine reads /proc/cpuinfo, which on arm64 names no model."""
    lscpu = shutil.which("lscpu")
    if engine_says != "CPU" or lscpu is None:
        return engine_says
    said = await run([lscpu], timeout_s=_TOOL_S, env={"LC_ALL": "C"})
    fields = dict(line.split(":", 1) for line in said.output if ":" in line)
    return fields.get("Model name", engine_says).strip()


def _system() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release().split('-')[0]}"
