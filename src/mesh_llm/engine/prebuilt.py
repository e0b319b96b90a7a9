"""Native libraries that came with the package, compiled for the common processors.

The best one that this processor can run is checked as one that was built here
is, before it counts; one that fails is left for the next lower. What passed is remembered.
A library for GPUs comes with a package of its own, which is optional: `mesh-llm-cuda`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import gpus
from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.inspect import flaw
from mesh_llm.engine.machine import cpu_features, cpu_identity, platform_name
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder

log = logging.getLogger(__name__)


@frozen
class Variant:
    """One of ggml's variants of its CPU code, and what the kernel calls the features that it needs."""

    name: str
    features: frozenset[str]


def _rising(*steps: tuple[str, str]) -> tuple[Variant, ...]:
    """Each needs what the one before it does, and more; the best comes first."""
    features: frozenset[str] = frozenset()
    found: list[Variant] = []
    for name, more in steps:
        features |= set(more.split())
        found.append(Variant(name=name, features=features))
    return tuple(reversed(found))


_HASWELL = (
    ("x64", ""),
    ("sse42", "sse4_2"),
    ("sandybridge", "avx"),
    ("haswell", "f16c fma avx2 bmi2"),
)
_AVX512 = (
    ("skylakex", "avx512f avx512cd avx512vl avx512dq avx512bw"),
    ("cascadelake", "avx512_vnni"),
    ("cooperlake", "avx512_bf16"),
    ("sapphirerapids", "avx512vbmi amx_tile amx_int8"),
)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    # cooperlake serves Zen 4, and cascadelake Ice Lake: ggml has no code for what these have besides (VBMI).
    "x86_64": (
        *_rising(*_HASWELL, *_AVX512)[: len(_AVX512)],
        *_rising(*_HASWELL, ("alderlake", "avx_vnni")),
    ),
    "aarch64": _rising(
        ("armv8.0_1", ""),
        ("armv8.2_1", "asimddp"),
        ("armv8.2_2", "asimdhp"),
        ("armv8.2_3", "sve"),
        ("armv8.6_1", "i8mm"),
        ("armv8.6_2", "sve2"),
    ),
    # macOS; which one a processor can run is told by the library itself.
    "arm64": _rising(("apple_m1", ""), ("apple_m2_m3", ""), ("apple_m4", "")),
}
"""By processor family, the best first."""


GPU_PACKAGES = {"cuda": "mesh_llm_cuda"}
"""By kind of GPU: the package that has a library for it."""


def folder() -> Path:
    return Path(__file__).resolve().parent.parent / "prebuilt"


def gpu_folder(kind: str) -> Path | None:
    """Of the package with the library for a kind of GPU, if it is here and made for this engine."""
    name = GPU_PACKAGES.get(kind)
    spec = importlib.util.find_spec(name) if name else None
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent
    with suppress(OSError):
        if (found / "ENGINE_VERSION").read_text().strip() == ENGINE_VERSION:
            return found
    return None


def of_package(path: Path) -> bool:
    return path.parent in {folder(), *map(gpu_folder, GPU_PACKAGES)}


def gpu_kinds() -> tuple[str, ...]:
    """Kinds of GPUs that are here and have a package."""
    present = {kind for gpu in gpus.found() for kind in gpu.kinds}
    return tuple(kind for kind in GPU_PACKAGES if kind in present and candidates(kind))


def suitable(variants: Iterable[Variant], features: frozenset[str] | None) -> tuple[str, ...]:
    """Names of those that a processor can run, in their order; all, where its features are not known."""
    return tuple(variant.name for variant in variants if features is None or variant.features <= features)


def candidates(backend: str) -> tuple[Path, ...]:
    """Files of the package that may serve as this library, the best first."""
    if backend == "cpu":
        stems = [
            f"ggml-cpu-{name}" for name in suitable(VARIANTS.get(platform.machine(), ()), cpu_features())
        ]
    else:
        stems = ["mesh-splice" if backend == "splice" else f"ggml-{backend}"]
    suffix = "dylib" if sys.platform == "darwin" else "so"
    place = gpu_folder(backend) or folder()
    return tuple(path for stem in stems if (path := place / f"lib{stem}.{suffix}").is_file())


def known(backend: str, mesh: Path | None) -> Path | None:
    """The one that passed before; nothing is started."""
    for path in candidates(backend):
        if backend == "splice" or (_can_be_checked(backend, mesh) and _record(path, mesh).is_file()):
            return path
    return None


async def checked(backend: str, mesh: Path | None) -> Path | None:
    """The best one that passes; None where none does, or there is none."""
    if (path := known(backend, mesh)) is not None or not _can_be_checked(backend, mesh):
        return path
    found = candidates(backend)
    if not found:
        return None
    try:
        lock = _record(found[0], mesh).with_name("checking.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        async with file_lock(lock, waiting_for=f"checking {found[0].name}"):
            return known(backend, mesh) or await _first_that_passes(backend, found, mesh)
    except OSError:
        # No place to remember anything: it is checked at every start.
        return await _first_that_passes(backend, found, mesh)


def _can_be_checked(backend: str, mesh: Path | None) -> bool:
    """libggml-mesh does the checking, its own included."""
    return backend in ("mesh", "splice") or mesh is not None


async def _first_that_passes(backend: str, paths: Iterable[Path], mesh: Path | None) -> Path | None:
    for path in paths:
        why = await flaw(backend, path, mesh)
        if why is None:
            with suppress(OSError):
                _record(path, mesh).touch()
            return path
        log.warning("library left out path=%s cause=%s", path, why)
    return None


def _record(path: Path, mesh: Path | None) -> Path:
    """Exists once the library has passed: on this processor and GPU, with this engine, these very bytes."""
    files = [path, *([] if mesh is None or mesh == path else [mesh])]
    kind = path.stem.removeprefix("libggml-")
    depends = [
        cpu_identity(),
        *([gpus.identity(kind)] if kind in gpus.KINDS else []),
        *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files),
    ]
    key = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]
    return (
        cache_folder() / "native" / f"{ENGINE_VERSION}-{platform_name()}" / f"checked-{path.stem[3:]}-{key}"
    )
