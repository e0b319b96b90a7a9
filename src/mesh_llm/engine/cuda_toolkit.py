"""CUDA's compiler and cuBLAS, from the Python index, for a machine that has a driver and no toolkit.

`cuda-toolkit.lock` names them with their hashes. The compiler can be removed once libggml-cuda is built;
cuBLAS is what that library loads. Each has a folder of its own in the cache, which appears complete, by a
rename, or not at all, and goes in the same way.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import tempfile
from pathlib import Path

from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.machine import platform_name
from mesh_llm.engine.packages import pip_install_locked
from mesh_llm.engine.process import module, run
from mesh_llm.engine.sources import free_bytes
from mesh_llm.errors import BuildFailed, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder
from mesh_llm.types import ProgressSink

LOCK = Path(__file__).with_name("cuda-toolkit.lock")
MACHINES = ("x86_64", "aarch64")
"""Processors that the packages are made for."""
FETCH_TIMEOUT_S = 2 * 3600.0
"""520 MB over a slow line."""
FETCH_DISK_BYTES = 1_500_000_000
"""The packages, and what they unpack to: 0.24 GB for the compiler, 0.56 GB for cuBLAS."""
DRIVER_TIMEOUT_S = 60.0
"""A driver that nobody has used since the machine started takes seconds."""

_CUBLAS = "nvidia-cublas"
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_OLDEST_GPU = {13: (7, 5)}
"""Of each CUDA that dropped some: the first compute capability that it still compiles for."""
_OLDEST_DRIVER = {12: 525, 13: 580}


# -- what the driver and a compiler can do together -----------------------------------------------------


@frozen
class Driver:
    release: tuple[int, int]
    """The newest CUDA that it runs; it runs later releases with the same first number, too."""
    gpus: tuple[tuple[str, tuple[int, int]], ...]
    """Names and compute capabilities."""


async def ask_driver() -> Driver | None:
    """None where its library does not load. Asked in a child: a driver may end the process that uses it."""
    argv = module("mesh_llm.engine.children.cuda_driver")
    finished = await run(argv, stdin=b"\n", timeout_s=DRIVER_TIMEOUT_S)
    answer = json.loads(finished.output[-1]) if finished.status == 0 and finished.output else None
    if answer is None:
        return None
    major, minor = answer["release"]
    gpus = tuple((gpu["name"], (gpu["capability"][0], gpu["capability"][1])) for gpu in answer["gpus"])
    return Driver(release=(major, minor), gpus=gpus)


async def release_of(nvcc: str) -> tuple[int, int] | None:
    """Of an installed compiler, as it tells."""
    finished = await run([nvcc, "--version"], timeout_s=DRIVER_TIMEOUT_S)
    found = _RELEASE.search("\n".join(finished.output))
    return (int(found[1]), int(found[2])) if found else None


def check_driver(driver: Driver | None, release: tuple[int, int]) -> None:
    """Refuse before anything is fetched or compiled that could not run here."""
    if driver is None:
        raise BuildFailed(
            "the library of the NVIDIA driver (libcuda.so.1) is missing or does not load",
            hint="install the driver's own package (sudo apt install libcuda1); a container gets it with "
            "--gpus all, or --device nvidia.com/gpu=all",
        )
    major = release[0]
    instead = "install a CUDA 12 toolkit (nvcc and cuBLAS) and put it first on the PATH"
    if driver.release[0] < major:
        needed = _OLDEST_DRIVER.get(major)
        raise BuildFailed(
            f"the NVIDIA driver runs CUDA up to {_text(driver.release)}, the compiler is of {_text(release)}",
            hint=f"update the driver{f' to version {needed} or newer' if needed else ''}, or {instead}",
        )
    oldest = _OLDEST_GPU.get(major, (0, 0))
    if old := [name for name, capability in driver.gpus if capability < oldest]:
        raise BuildFailed(
            f"{', '.join(old)}: too old for CUDA {_text(release)}, which begins with compute capability "
            f"{_text(oldest)}",
            hint=instead,
        )


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


# -- what is fetched ------------------------------------------------------------------------------------


@frozen
class Part:
    """Packages that are fetched and dropped together."""

    name: str
    what: str
    lines: tuple[str, ...]
    """Of the lock file."""

    @property
    def folder(self) -> Path:
        key = hashlib.sha256("\n".join((platform_name(), *self.lines)).encode()).hexdigest()[:16]
        return _root() / f"{self.name}-{key}"


@frozen
class Toolkit:
    """A compiler and cuBLAS as CMake takes them."""

    root: Path
    cublas: Path

    @property
    def options(self) -> tuple[str, ...]:
        return (f"-DCUDAToolkit_ROOT={self.root}", f"-DCUDA_cublas_LIBRARY={self.cublas}")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CUDACXX": str(self.root / "bin" / "nvcc"),
            "CPATH": str(self.cublas.parent.parent / "include"),
        }


def _root() -> Path:
    return cache_folder() / "cuda"


def parts() -> tuple[Part, Part]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    compiler = tuple(line for line in lines if not line.startswith(_CUBLAS))
    cublas = tuple(line for line in lines if line.startswith(_CUBLAS))
    return (
        Part(name="compiler", what="CUDA's compiler", lines=compiler),
        Part(name="cublas", what="cuBLAS", lines=cublas),
    )


def fetched_release() -> tuple[int, int]:
    """Of the compiler that the lock file names."""
    version = parts()[0].lines[0].split()[0].split("==")[1]
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def can_be_fetched() -> bool:
    return platform.system() == "Linux" and platform.machine() in MACHINES


async def fetch(progress: ProgressSink) -> Toolkit:
    """The toolkit of the lock file, from the cache or from the index."""
    compiler, cublas = [await _fetched(part, progress) for part in parts()]
    inside = Path("nvidia") / f"cu{fetched_release()[0]}"
    root = compiler / inside
    return Toolkit(root=root, cublas=next((cublas / inside / "lib").glob("libcublas.so.*")))


async def _fetched(part: Part, progress: ProgressSink) -> Path:
    folder, parent = part.folder, _root()
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(parent)) < FETCH_DISK_BYTES:
        raise MeshError(
            f"fetching {part.what} needs {FETCH_DISK_BYTES / 1e9:.1f} GB in {parent}; "
            f"{free / 1e9:.1f} GB are free",
            hint="free some space, or name another folder in MESH_LLM_CACHE",
        )
    async with file_lock(parent / "lock", waiting_for=f"fetching {part.what}", timeout_s=FETCH_TIMEOUT_S):
        _clear()
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=parent, prefix=_HALF) as scratch:
                requirements, target = Path(scratch) / "requirements.txt", Path(scratch) / "packages"
                requirements.write_text("\n".join(part.lines) + "\n")
                await pip_install_locked(
                    requirements, target, what=part.what, progress=progress, timeout_s=FETCH_TIMEOUT_S
                )
                _link_runtime(target)
                target.rename(folder)
    return folder


def _link_runtime(target: Path) -> None:
    """CMake looks for CUDA's runtime by its plain name, which packages leave out."""
    for library in target.glob("nvidia/*/lib/libcudart.so.*"):
        library.with_name("libcudart.so").symlink_to(library.name)


# -- and dropped ----------------------------------------------------------------------------------------

_HALF = "incoming-"
"""Begins the name of what is not whole: not yet, or not any more."""


def drop_compiler() -> None:
    _drop("compiler-*")


def drop() -> None:
    """cuBLAS, too: what was built with it no longer runs."""
    _drop("compiler-*", "cublas-*")


def _drop(*patterns: str) -> None:
    for pattern in patterns:
        for folder in _root().glob(pattern):
            folder.rename(folder.with_name(f"{_HALF}{folder.name}"))
    _clear()


def _clear() -> None:
    for left in _root().glob(f"{_HALF}*"):
        shutil.rmtree(left, ignore_errors=True)
