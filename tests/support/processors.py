"""Nodes of this machine that compute as one with another processor would.

Each kind has a cache folder of its own, and nodes that get its `env` use the CPU code that they find there.
All else in it is the usual cache's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mesh_llm.engine.build import SPLICE, Library, compiler, library
from mesh_llm.engine.machine import cpu_features
from mesh_llm.home import cache_folder
from tests.support.command import mesh_llm

BUILD_S = 900.0
"""A minute on two quiet cores."""
_FOLDER = "other-processors"
_AVX2 = "haswell"
_COMPILER = """#!/bin/sh
# For an older processor than this machine's.
for word in "$@"; do
    shift
    [ "$word" = -march=native ] && word=-march={march}
    set -- "$@" "$word"
done
exec {real} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProcessor:
    cache: Path
    library: Path | None
    """Of the CPU; None where its nodes compute with the engine's own code."""

    @property
    def env(self) -> dict[str, str]:
        return {"MESH_LLM_CACHE": str(self.cache)}


def can_build_avx2() -> bool:
    """Whether code for AVX2 can be made here, and is another than this machine's own."""
    tools = compiler() and shutil.which("cc")
    return bool(tools) and {"avx2", "fma", "avx512f"} <= (cpu_features() or frozenset())


def with_avx2() -> OtherProcessor:
    """An older x86-64, without AVX-512 and AMX; its library is compiled once on each machine."""
    cache = _cache(_AVX2)
    entry = _there(library("cpu"), cache)
    if not entry.built:
        ended = mesh_llm(
            "engine",
            "build",
            env={"MESH_LLM_CACHE": str(cache), **_compilers(cache / "tools", _AVX2)},
            within_s=BUILD_S,
        )
        assert ended.status == 0, ended.stderr
        assert entry.built, ended.stdout + ended.stderr
    return OtherProcessor(cache=cache, library=entry.path.resolve())


def without_library() -> OtherProcessor:
    """A machine on which no CPU library could be built."""
    cache = _cache("none")
    _there(library("cpu"), cache).failure.write_text("there is no C++ compiler on this machine")
    return OtherProcessor(cache=cache, library=None)


def features(processor: OtherProcessor | None) -> list[str]:
    """What the CPU code is made for, with which its nodes compute, or the usual ones."""
    ended = mesh_llm("engine", "info", "--json", env=processor.env if processor else {})
    assert ended.status == 0, ended.stderr
    found: list[str] = json.loads(ended.stdout)["cpu_features"]
    return found


def libraries_in(pids: Sequence[int]) -> set[Path]:
    """CPU libraries that these processes have loaded."""
    found: set[Path] = set()
    for pid in pids:
        # One that has ended meanwhile computes nothing.
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"(/\S*/libggml-cpu\S*)$", maps, re.MULTILINE)}
    return found


def _cache(name: str) -> Path:
    """With everything but the CPU library."""
    cache = cache_folder() / _FOLDER / name
    cache.mkdir(parents=True, exist_ok=True)
    _link(cache / "sources", cache_folder() / "sources")
    for entry in map(library, ("mesh", SPLICE)):
        if entry.built:
            _link(_there(entry, cache).folder, entry.folder)
    return cache


def _there(entry: Library, cache: Path) -> Library:
    """The same library in another cache."""
    return Library(backend=entry.backend, folder=cache / entry.folder.relative_to(cache_folder()))


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(target)


def _compilers(folder: Path, march: str) -> dict[str, str]:
    """This machine's, which take another processor for its own."""
    folder.mkdir(exist_ok=True)
    tools = {}
    for name, real in (("CC", shutil.which("cc")), ("CXX", compiler())):
        path = folder / name
        path.write_text(_COMPILER.format(march=march, real=real))
        path.chmod(0o755)
        tools[name] = str(path)
    return tools
