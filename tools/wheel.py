"""Make a wheel with everything in it, and an sdist: what `make wheel` runs.

The wheel carries libggml-mesh, libmesh-splice and CPU libraries for the common processors, so that whoever
installs it needs no compiler, and llama.cpp's web page, for those who install it without the engine. The
libraries are compiled here, in build/wheel, for machines with an older glibc than this one's.
Equal sources give equal bytes with an equal compiler.

Tried on Linux, x86-64. The same command is the recipe for Linux on arm64 and for macOS; untried.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine.build import compiler
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.page import PACKAGED, take_out
from mesh_llm.engine.prebuilt import VARIANTS
from mesh_llm.engine.sources import sources_tree
from tools import glibc_floor

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel"
MACOS = sys.platform == "darwin"
MACOS_FLOOR = "13.0"
EPOCH = "1577836800"
"""Of files in the wheel, where SOURCE_DATE_EPOCH does not say: zip files know no time before 1980."""


def main() -> None:
    parser = argparse.ArgumentParser(description="make a wheel with native libraries, and an sdist")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="of the CPU libraries, these alone")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--build", type=Path, default=BUILD)
    arguments = parser.parse_args()
    variants = arguments.only or [variant.name for variant in VARIANTS[platform.machine()]]
    libraries = compile_libraries(arguments.build.resolve(), variants)
    if not MACOS:
        check(libraries)
    add_page(libraries)
    pack(libraries, arguments.dist)


# -- libraries ------------------------------------------------------------------------------------


def compile_libraries(build: Path, variants: list[str]) -> Path:
    """Compile everything below `build`; returns the folder that the libraries are in."""
    engine = Path(output([sys.executable, "-m", "mesh_llm.engine.sources"]))
    finished = build / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir(parents=True)
    options = common_options(build, engine)
    ggml = [f"-DENGINE_SOURCE={engine}", f"-DMESH_ENGINE_VERSION={ENGINE_VERSION}", "-DGGML_CCACHE=OFF"]
    make(build / "splice", ROOT / "native" / "splice", options, ["mesh-splice"], finished)
    make(build / "mesh", ROOT / "native", [*options, *ggml], ["ggml-mesh"], finished)
    named = ["-DMESH_BACKENDS=cpu", f"-DMESH_CPU_VARIANTS={';'.join(variants)}"]
    targets = [f"ggml-cpu-{variant}" for variant in variants]
    make(build / "cpu", ROOT / "native", [*options, *ggml, *named], targets, finished)
    return finished


def common_options(build: Path, engine: Path) -> list[str]:
    """CMake's: no name of a folder and no date gets into a library, and nothing newer than the floor."""
    folders = {build: "build", ROOT / "native": "native", engine: "engine"}
    flags = "-w " + " ".join(f"-ffile-prefix-map={folder}={name}" for folder, name in folders.items())
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    if MACOS:
        return [*options, f"-DCMAKE_OSX_DEPLOYMENT_TARGET={MACOS_FLOOR}"]
    stubs = build / "stubs"
    glibc_floor.write_stubs(_compiler(), stubs, ROOT / "native" / "floor")
    linked = [*glibc_floor.link_options(stubs), "-Wl,--build-id=none", "-Wl,--strip-all"]
    return [
        *options,
        f"-DCMAKE_MODULE_LINKER_FLAGS={shlex.join(linked)}",
        f"-DOpenMP_gomp_LIBRARY={stubs / 'libgomp.a'}",
    ]


def make(folder: Path, project: Path, options: list[str], targets: list[str], finished: Path) -> None:
    environment = {**os.environ, "CXX": _compiler(), "LC_ALL": "C"}
    cmake, ninja = (_tool(name) for name in ("cmake", "ninja"))
    configure = [
        cmake,
        "-S",
        str(project),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        *options,
    ]
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", folder, "--target", *targets], check=True, env=environment)
    for target in targets:
        made = next((folder / "lib").glob(f"lib{target}.*"))
        shutil.copyfile(made, finished / f"lib{target}{'.dylib' if MACOS else '.so'}")


def _compiler() -> str:
    found = compiler()
    if found is None:
        raise SystemExit("Error: there is no C++ compiler on this machine")
    return found


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if found is None:
        raise SystemExit(f"Error: {name} is missing: .venv/bin/pip install {name}")
    return found


def output(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def check(libraries: Path) -> None:
    """Refuse libraries that an older system could not load."""
    provided = glibc_floor.exports(find_wheel().module) | OPENMP
    wrong = [flaw for path in sorted(libraries.iterdir()) for flaw in glibc_floor.flaws(path, provided)]
    if wrong:
        raise SystemExit("Error: " + "\n".join(wrong))


def add_page(libraries: Path) -> None:
    """llama.cpp's web page, with its licence."""
    asyncio.run(take_out(libraries / PACKAGED))
    shutil.copyfile(sources_tree() / "LICENSE", libraries / "page-LICENSE")


OPENMP = frozenset(
    ["GOMP_barrier", "GOMP_parallel", "GOMP_single_start", "omp_get_num_threads", "omp_get_thread_num"]
)
"""Of libgomp, which the engine's wheel loads: it needs a newer one than these are from."""


# -- wheel ----------------------------------------------------------------------------------------


def pack(libraries: Path, dist: Path) -> None:
    environment = {"SOURCE_DATE_EPOCH": EPOCH, **os.environ}
    environment |= {"MESH_LLM_PREBUILT": str(libraries), "MESH_LLM_WHEEL_TAG": f"py3-none-{platform_tag()}"}
    hatchling = [sys.executable, "-m", "hatchling", "build", "--directory", str(dist.resolve())]
    for kind in ("wheel", "sdist"):
        subprocess.run([*hatchling, "--target", kind], check=True, env=environment, cwd=ROOT)


def platform_tag() -> str:
    machine = platform.machine()
    if MACOS:
        return f"macosx_{MACOS_FLOOR.replace('.', '_')}_{machine}"
    major, minor = glibc_floor.FLOOR
    return f"manylinux_{major}_{minor}_{machine}"


if __name__ == "__main__":
    main()
