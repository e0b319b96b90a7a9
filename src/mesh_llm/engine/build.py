"""Native libraries: built from the engine's sources, once per machine, by whoever comes first.

Where none was built, one that came with the package will do (`prebuilt`).
Each library has a folder of its own in the cache, named after everything that
its code depends on. A folder appears complete, by a rename, or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from mesh_llm.defaults import ENGINE_VERSION, LOCK_TIMEOUT_S
from mesh_llm.engine import cuda_toolkit, gpus, prebuilt
from mesh_llm.engine.cuda_toolkit import Toolkit
from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.inspect import flaw
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.machine import available_memory, cores, cpu_identity, platform_name
from mesh_llm.engine.process import gently, run
from mesh_llm.engine.sources import engine_sources, free_bytes, native_folder
from mesh_llm.errors import BuildFailed, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder
from mesh_llm.types import Progress, ProgressSink

BUILD_TIMEOUT_S = 40 * 60.0
"""The CPU library takes about a minute on two cores; where others want them, too, many times that."""
BUILD_DISK_BYTES = 600_000_000
"""Sources, objects and libraries of the CPU build take half of it."""
GPU_BUILD_TIMEOUT_S = 3 * 3600.0
"""CUDA's takes 282 s on 16 cores of a server (bench/results/gpu-trials.md): over an hour of one of them."""
GPU_BUILD_DISK_BYTES = 3_000_000_000
"""A guess: objects and library of CUDA's build for one kind of GPU, beside the sources."""
BUILD_SHOWN_LINES = 12
"""Of the compiler's output when it fails: the error and its surroundings, on one screen."""
SCRATCH_TRIES = 10
SCRATCH_PAUSE_S = 0.05
"""To remove the folder of a build whose compiler was killed a moment ago, and may still write a file."""


_MESH_SUFFIXES = (".cmake", ".cpp", ".h")
_MESH_FOLDERS = ("wire", "host", "worker", "rules", "hooks")
_FACTS = "build.json"
_NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\] ")

STANDARD = ("mesh", "cpu")
"""What every node builds. The mesh library comes first: it checks the others' arithmetic.

Beside it are the `gpus` that a person has asked for. `build` takes any other of ggml's
backends, too: a bench asks for `rpc`.
"""
SPLICE = "splice"
"""For the node: it copies between data links and QUIC streams, and needs neither engine nor ggml."""


@frozen
class Library:
    """One native library, built or to be built."""

    backend: str
    folder: Path

    @property
    def gpu(self) -> gpus.Kind | None:
        return gpus.KINDS.get(self.backend)

    @property
    def name(self) -> str:
        return "mesh-splice" if self.backend == SPLICE else f"ggml-{self.backend}"

    @property
    def path(self) -> Path:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        return self.folder / f"lib{self.name}.{suffix}"

    @property
    def built(self) -> bool:
        """And whole: a power cut can leave a name with half of the bytes, which kills whoever loads it."""
        note = self.folder / _FACTS
        try:
            noted = json.loads(note.read_text()).get("bytes") if note.exists() else None
            return noted in (None, self.path.stat().st_size)
        except (OSError, ValueError):
            return False

    @property
    def failure(self) -> Path:
        """Why the last automatic build failed, so that the next start does not try it all again."""
        return self.folder.with_name(f"{self.folder.name}.failed")


@frozen
class Built:
    """The libraries at hand, and a sentence for each that is not."""

    libraries: dict[str, Path]
    missing: dict[str, MeshError]
    later: tuple[str, ...] = ()
    """Those that would have to be compiled, and may be while others are in use already."""


def library(backend: str) -> Library:
    depends = [ENGINE_VERSION, platform_name(), *_source_digests(backend)]
    if kind := gpus.KINDS.get(backend):
        depends += [*kind.options, gpus.identity(backend)]
    elif backend not in ("mesh", SPLICE):
        depends.append(cpu_identity())
    key = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]
    folder = cache_folder() / "native" / f"{ENGINE_VERSION}-{platform_name()}" / f"{backend}-{key}"
    return Library(backend=backend, folder=folder)


def _source_digests(backend: str) -> Iterable[str]:
    """Our own files that a library is made of; ggml's are named by the engine's version."""
    if backend == SPLICE:
        own = sorted(file for file in (native_folder() / "splice").iterdir() if file.is_file())
    else:
        own = [native_folder() / "CMakeLists.txt", native_folder() / "cpu_attention.cmake"]
    if backend == "mesh":
        folders = [native_folder(), *(native_folder() / name for name in _MESH_FOLDERS)]
        own += sorted(
            file for folder in folders for file in folder.iterdir() if file.suffix in _MESH_SUFFIXES
        )
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in own]


def usual() -> tuple[str, ...]:
    """What this machine has by itself: the standard, and GPUs' that were built before or have a package."""
    asked = gpus.usual()
    # Vulkan's would drive the same GPUs once more.
    packaged = () if "vulkan" in asked else prebuilt.gpu_kinds()
    return (*STANDARD, *dict.fromkeys((*asked, *packaged)))


def at_hand() -> Built:
    """What is built already, or came with the package and was found good; nothing is started."""
    libraries: dict[str, Path] = {}
    missing: dict[str, MeshError] = {}
    for backend in usual():
        entry = library(backend)
        path = entry.path if entry.built else prebuilt.known(backend, libraries.get("mesh"))
        if path is None:
            missing[backend] = BuildFailed("not built yet")
        else:
            libraries[backend] = path
    return Built(libraries=libraries, missing=missing)


async def ready() -> Built:
    """The same; what came with the package is checked first, where nobody has."""
    mesh = library("mesh")
    path = mesh.path if mesh.built else await prebuilt.checked("mesh", None)
    for backend in usual():
        if backend != "mesh" and not library(backend).built:
            await prebuilt.checked(backend, path)
    return at_hand()


async def rebuild(progress: ProgressSink, *, gpu: str | None = None, force: bool = False) -> Built:
    """The usual, again where it failed before; with `gpu`, that kind is part of it from now on."""
    if gpu is not None and (force or not library(gpu).built):
        # Before anything else is compiled, which takes a minute.
        await _check_gpu(gpus.KINDS[gpu])
    kinds = gpus.usual() if gpu is None else gpus.beside(gpu, gpus.usual())
    built = await ensure((*STANDARD, *kinds), progress, retry=True, force=force)
    if gpu is not None and gpu in built.libraries:
        gpus.want(gpus.beside(gpu, gpus.wanted()))
    return built


def drop_gpus() -> tuple[str, ...]:
    """Do without libraries for GPUs from now on; returns the kinds that there were."""
    dropped = gpus.wanted()
    gpus.want(())
    cuda_toolkit.drop()
    for kind in gpus.KINDS:
        for path in (cache_folder() / "native").glob(f"*-{platform_name()}/{kind}-*"):
            # Locks stay: whoever waits for one would hold another than the next who comes.
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".failed":
                path.unlink(missing_ok=True)
    return dropped


async def ensure(
    backends: Iterable[str],
    progress: ProgressSink,
    *,
    retry: bool = False,
    force: bool = False,
    later: Collection[str] = (),
    gentle: bool = False,
) -> Built:
    """Every library that can be had. One that cannot is left out, with the reason.

    What came with the package will do, but not with `retry`, which also tries again
    what failed before; `force` builds what is there already. What is named in `later` is
    not compiled now; `gentle` compiles with what others leave of the processor.
    """
    libraries: dict[str, Path] = {}
    missing: dict[str, MeshError] = {}
    put_off: list[str] = []
    for backend in backends:
        entry = library(backend)
        mesh = libraries.get("mesh")
        try:
            if not (retry or force or entry.built) and (path := await prebuilt.checked(backend, mesh)):
                libraries[backend] = path
                continue
            if not (retry or force or entry.built):
                _leave_to_package(entry)
            if not (retry or force or entry.built) and entry.failure.is_file():
                raise MeshError(entry.failure.read_text(), hint="mesh-llm engine build tries again")
            if backend in later and not entry.built:
                _check_tools(entry, mesh)
                put_off.append(backend)
                continue
            await build(entry, progress, retry=retry, force=force, mesh=mesh, gentle=gentle)
            libraries[backend] = entry.path
        except BuildFailed as error:
            missing[backend] = error
            with suppress(OSError):
                entry.failure.write_text(error.message)
        except MeshError as error:
            missing[backend] = error
        except OSError as error:
            missing[backend] = MeshError(
                f"cannot build in {cache_folder()}: {error.strerror}",
                hint="free some space, or name another folder in MESH_LLM_CACHE",
            )
    return Built(libraries=libraries, missing=missing, later=tuple(put_off))


def _leave_to_package(entry: Library) -> None:
    """Who has installed a library for GPUs has not asked for one to be compiled, which takes many minutes."""
    if entry.gpu and entry.backend not in gpus.wanted() and prebuilt.candidates(entry.backend):
        raise MeshError(
            f"{entry.name} of the package mesh-llm-{entry.backend} does not work on this machine",
            hint=f"{entry.gpu.command} compiles one for its GPUs; the log has the reason",
        )


async def build(
    entry: Library,
    progress: ProgressSink,
    *,
    retry: bool,
    force: bool,
    mesh: Path | None,
    gentle: bool = False,
) -> None:
    """Build one library unless it is there. Two nodes that start together build it once."""
    if entry.built and not force and not (retry and await _has_decayed(entry, mesh)):
        return
    force = force or entry.built
    if entry.backend != SPLICE:
        find_wheel()
    if entry.gpu is not None:
        await _check_gpu(entry.gpu)
    _check_tools(entry, mesh)
    sources = None if entry.backend == SPLICE else await engine_sources(progress)
    toolkit = await cuda_toolkit.fetch(progress) if entry.gpu and _is_fetched(entry.gpu) else None
    entry.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = entry.folder.with_name(f"{entry.folder.name}.lock")
    patience_s = GPU_BUILD_TIMEOUT_S if entry.gpu else LOCK_TIMEOUT_S
    async with file_lock(lock, waiting_for=f"building {entry.name}", timeout_s=patience_s):
        if entry.built and not force:
            return
        prefix = f"building-{entry.folder.name}-"
        for left in entry.folder.parent.glob(f"{prefix}*"):
            # By a build that was killed: whoever still worked there would hold the lock.
            shutil.rmtree(left, ignore_errors=True)
        async with _scratch(entry.folder.parent, prefix) as scratch:
            made = await _compile(entry, sources, scratch / "plain", progress, toolkit=toolkit, gentle=gentle)
            flaw = await _flaw(entry, made, mesh)
            if flaw is not None and entry.backend == "cpu":
                # AMX is the newest code path and the one that compilers got wrong before.
                no_amx = scratch / "no-amx"
                made = await _compile(
                    entry, sources, no_amx, progress, options=("-DMESH_AMX=OFF",), gentle=gentle
                )
                flaw = await _flaw(entry, made, mesh)
            if flaw is not None:
                raise BuildFailed(f"{entry.name} was built, but computes wrong results: {flaw}")
            _install(made, entry)


@asynccontextmanager
async def _scratch(parent: Path, prefix: str) -> AsyncIterator[Path]:
    """A folder that goes with the block, as far as that can be: the next build removes what is left.

    Of a compiler that was just killed, a last file may still appear. Raised from here, that would
    take the place of the cancellation which ended it.
    """
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield folder
    finally:
        for _ in range(SCRATCH_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            await asyncio.sleep(SCRATCH_PAUSE_S)


def _install(made: Path, entry: Library) -> None:
    scratch = made.parent / "finished"
    scratch.mkdir()
    made.rename(scratch / entry.path.name)
    facts = {
        "engine": ENGINE_VERSION,
        "platform": platform_name(),
        "backend": entry.backend,
        "bytes": (scratch / entry.path.name).stat().st_size,
    }
    (scratch / _FACTS).write_text(json.dumps(facts) + "\n")
    shutil.rmtree(entry.folder, ignore_errors=True)
    scratch.rename(entry.folder)
    entry.failure.unlink(missing_ok=True)


async def _has_decayed(entry: Library, mesh: Path | None) -> bool:
    """Whether a GPU's library no longer works: toolkits and drivers are updated under it, and removed."""
    return entry.gpu is not None and mesh is not None and await _flaw(entry, entry.path, mesh) is not None


def _is_fetched(kind: gpus.Kind) -> bool:
    """Whether the toolkit of a kind comes from the index: where it can, and none is here."""
    return kind.name == "cuda" and cuda_toolkit.can_be_fetched() and gpus.tool(kind) is None


async def _check_gpu(kind: gpus.Kind) -> None:
    fetched = _is_fetched(kind)
    gpus.check(kind, fetched=fetched)
    if kind.name != "cuda":
        return
    release = cuda_toolkit.fetched_release() if fetched else None
    if nvcc := gpus.tool(kind):
        release = await cuda_toolkit.release_of(nvcc)
    if release is not None:
        cuda_toolkit.check_driver(await cuda_toolkit.ask_driver(), release)


def _check_tools(entry: Library, mesh: Path | None) -> None:
    folder, needed = entry.folder.parent, BUILD_DISK_BYTES
    if entry.gpu is not None:
        needed = GPU_BUILD_DISK_BYTES
        if mesh is None:
            raise BuildFailed(
                f"{entry.name} cannot be checked without libggml-mesh, which could not be built"
            )
    if compiler() is None:
        raise BuildFailed(
            "there is no C++ compiler on this machine",
            hint="xcode-select --install" if sys.platform == "darwin" else "sudo apt install g++",
        )
    for name in ("cmake", "ninja"):
        _tool(name)
    free = free_bytes(folder)
    if free < needed:
        raise MeshError(
            f"building needs {needed / 1e9:.1f} GB in {folder}; {free / 1e9:.1f} GB are free",
            hint="free some space, or name another folder in MESH_LLM_CACHE",
        )


def compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(
        (path for name in (named, "c++", "g++", "clang++") if name and (path := shutil.which(name))), None
    )


def _tool(name: str) -> str:
    """CMake and ninja as installed beside us, else any on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    path = str(beside) if beside.is_file() else shutil.which(name)
    if path is None:
        raise BuildFailed(
            f"{name} is needed to compile native libraries, and it is not installed",
            hint=f"{sys.executable} -m pip install cmake ninja, or pip install 'mesh-llm[engine,build]'",
        )
    return path


async def _compile(
    entry: Library,
    sources: Path | None,
    folder: Path,
    progress: ProgressSink,
    *,
    options: Sequence[str] = (),
    toolkit: Toolkit | None = None,
    gentle: bool = False,
) -> Path:
    what = f"Building {entry.name}"
    progress(Progress(what=what, done=0, total=0))
    environment = {"NINJA_STATUS": "[%f/%t] ", "CXX": compiler() or "c++", **_toolkit(entry, toolkit)}
    limit_s = GPU_BUILD_TIMEOUT_S if entry.gpu else BUILD_TIMEOUT_S
    await _step(
        what,
        [
            *(_tool("cmake"), "-S", _project(entry), "-B", folder, "-G", "Ninja"),
            *(f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"),
            *([] if sources is None else _engine_options(entry.backend, sources)),
            *(entry.gpu.options if entry.gpu else ()),
            *(toolkit.options if toolkit else ()),
            *options,
        ],
        environment,
        progress,
        limit_s=limit_s,
        gentle=gentle,
        mend=_mend(entry, toolkit),
    )
    await _step(
        what,
        [_tool("cmake"), "--build", folder, "--target", entry.name, *_parallel(entry, gentle=gentle)],
        environment,
        progress,
        limit_s=limit_s,
        gentle=gentle,
    )
    made = next(iter((folder / "lib").glob(f"lib{entry.name}.*")), None)
    if made is None:
        raise BuildFailed(f"building {entry.name} produced no library")
    return made.rename(made.with_name(entry.path.name))


def _project(entry: Library) -> Path:
    return native_folder() / "splice" if entry.backend == SPLICE else native_folder()


def _engine_options(backend: str, sources: Path) -> list[str]:
    return [
        *("-DGGML_CCACHE=OFF", f"-DENGINE_SOURCE={sources}", f"-DMESH_ENGINE_VERSION={ENGINE_VERSION}"),
        f"-DMESH_BACKENDS={'' if backend == 'mesh' else backend}",
    ]


def _mend(entry: Library, toolkit: Toolkit | None) -> str | None:
    """For CMake's complaints: parts of a toolkit are packages of their own, and CMake misses them first."""
    if toolkit is not None:
        return "if CUDA does not take this C++ compiler: install an older one, and name it in CXX"
    return entry.gpu.mend if entry.gpu else None


def _toolkit(entry: Library, toolkit: Toolkit | None) -> dict[str, str]:
    """What CMake finds a GPU's compiler by."""
    if entry.gpu is None:
        return {}
    found = {"PATH": gpus.search_path(entry.gpu), **(toolkit.environment if toolkit else {})}
    if named := os.environ.get("CXX"):
        # Not every toolkit takes every compiler; who has named one for us means it for the toolkit, too.
        found["CUDAHOSTCXX"] = os.environ.get("CUDAHOSTCXX", named)
    return found


def _parallel(entry: Library, *, gentle: bool = False) -> list[str]:
    """ninja fills all cores by itself; a GPU's files take more memory than a machine may have for that,
    and beside a model there may be little for any."""
    if (entry.gpu is None and not gentle) or "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ:
        return []
    return ["--parallel", str(gpus.jobs(cores(), available_memory()))]


async def _step(
    what: str,
    argv: list[str | Path],
    environment: dict[str, str],
    progress: ProgressSink,
    *,
    limit_s: float,
    gentle: bool,
    mend: str | None = None,
) -> None:
    said: list[str] = []

    def on_line(line: str) -> None:
        if match := _NINJA_STEP.match(line):
            progress(Progress(what=what, done=int(match[1]), total=int(match[2]), unit="files"))
        said.append(line)
        del said[: -10 * BUILD_SHOWN_LINES]

    command = gently(argv) if gentle else argv
    finished = await run(command, timeout_s=limit_s, env=environment, on_line=on_line)
    if finished.status == 0:
        return
    if any("No space left on device" in line for line in said):
        raise MeshError("the disk filled up while building", hint="free some space and run it again")
    shown = "\n".join(_telling(said))
    raise BuildFailed(f"{what[0].lower()}{what[1:]} failed:\n{shown}", hint=mend)


def _telling(lines: list[str]) -> list[str]:
    """The compiler's last words: from its first error on, else from CMake's, else the end."""
    for mark in ("error:", "CMake Error"):
        for index, line in enumerate(lines):
            if mark in line:
                return lines[index:][:BUILD_SHOWN_LINES]
    return lines[-BUILD_SHOWN_LINES:]


async def _flaw(entry: Library, made: Path, mesh: Path | None) -> str | None:
    if entry.backend == SPLICE:
        return None  # it computes nothing
    return await flaw(entry.backend, made, mesh)
