"""What the figures of a measurement depend on: this machine, its load, this version, the default model."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.defaults import DEFAULT_MODEL, ENGINE_PACKAGE, ENGINE_VERSION
from mesh_llm.engine import machine
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError, ModelError
from mesh_llm.home import Home, models_folder
from mesh_llm.local import model_names
from mesh_llm.models import catalog
from mesh_llm.models.names import Here

TOOL_S = 10.0
"""For git or lscpu to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Others' work on this machine, as the kernel averages it over 1, 5 and 15 minutes."""

    averages: tuple[float, float, float]

    @classmethod
    def now(cls) -> Load:
        return cls(averages=os.getloadavg())

    def text(self) -> str:
        return " ".join(f"{average:.2f}" for average in self.averages)


def load_text(before: Load) -> str:
    return f"{before.text()} at the start, {Load.now().text()} at the end (the bench's own work included)"


async def machine_facts() -> dict[str, str]:
    """All that needs no engine; the load is taken when a measurement starts and when it ends."""
    return {
        "date": date(),
        "hardware": hardware(await cpu_name(platform.processor() or platform.machine())),
        "system": system(),
        "python": python(),
        "mesh-llm": __version__,
        "engine": f"{ENGINE_PACKAGE} {ENGINE_VERSION}",
    }


def date() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def hardware(cpu: str) -> str:
    return f"{cpu}, {os.cpu_count()} cores, {machine.total_memory() / 2**30:.0f} GiB"


def python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


async def cpu_name(otherwise: str) -> str:
    lscpu = shutil.which("lscpu")
    if lscpu is None:
        return otherwise
    said = await run([lscpu], timeout_s=TOOL_S, env={"LC_ALL": "C"})
    fields = dict(line.split(":", 1) for line in said.output if ":" in line)
    return fields.get("Model name", otherwise).strip()


def system() -> str:
    if platform.system() == "Darwin":
        name = f"macOS {platform.mac_ver()[0]}"
    else:
        try:
            release = platform.freedesktop_os_release()["PRETTY_NAME"]
        except (OSError, KeyError):
            release = platform.system()
        name = f"{release}, {platform.system()} {platform.release().split('-')[0]}"
    return f"{name}, {platform.machine()}"


async def model_file(name: str | None, home: Home) -> Path:
    """The file by that name on this machine, or that of the default model."""
    if name is None:
        return default_model()
    found = await model_names.resolve(name, home)
    if not isinstance(found, Here):
        raise ModelError(f"{name} is not on this machine", hint=f"mesh-llm download {name}")
    return found.path


def default_model() -> Path:
    """Where it is; a bench fetches nothing."""
    entry = catalog.load().find(DEFAULT_MODEL)
    path = models_folder() / entry.files[0]
    if not path.is_file():
        raise MeshError(
            f"the default model, {entry.name}, is not on this machine", hint=f"mesh-llm download {entry.name}"
        )
    return path
