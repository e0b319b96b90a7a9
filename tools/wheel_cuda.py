"""Make `mesh-llm-cuda`, a wheel with libggml-cuda for those without a compiler: what `make wheel-cuda` runs.

It goes beside `mesh-llm` of the same version, which finds and tests it at start. cuBLAS comes from the
package `nvidia-cublas`, CUDA's runtime is part of the library, and the driver is the machine's. The compiler
is the one that `mesh-llm engine build --cuda` fetches, and no GPU is needed here. For Linux on x86-64, and on
arm64, which is untried.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import cuda_toolkit, gpus
from mesh_llm.engine.cuda_toolkit import Toolkit
from mesh_llm.engine.library import find_wheel
from mesh_llm.errors import MeshError
from tools import glibc_floor, wheel

BUILD = wheel.ROOT / "build" / "wheel-cuda"
ARCHITECTURES = "75-real;80-real;86-real;89-real;90-real;100-real;120a-real"
"""From Turing to Blackwell. Each takes an hour of one core, and 40 MB or more of the library."""
CUBLAS = "$ORIGIN/../nvidia/cu{major}/lib"
"""Where pip puts `nvidia-cublas`, seen from the library."""

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "mesh-llm-cuda"
version = "{version}"
description = "libggml-cuda for mesh-llm, compiled for NVIDIA GPUs ({architectures})"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["mesh-llm[engine]=={version}", "nvidia-cublas>={cublas},<{next_major}"]

[tool.hatch.build.targets.wheel]
packages = ["mesh_llm_cuda"]
artifacts = ["*.so"]

[tool.hatch.build.targets.wheel.hooks.custom]
path = "tag.py"
"""
TAG = """\
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-{platform}"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="make a wheel with libggml-cuda")
    parser.add_argument("--architectures", default=ARCHITECTURES, help="as CMake names them, with ; between")
    parser.add_argument("--library", type=Path, help="pack this one, which was compiled before")
    parser.add_argument("--dist", type=Path, default=wheel.ROOT / "dist")
    parser.add_argument("--build", type=Path, default=BUILD)
    arguments = parser.parse_args()
    try:
        toolkit = asyncio.run(cuda_toolkit.fetch(lambda progress: None))
    except MeshError as error:
        raise SystemExit(f"Error: {error.message}\nHint: {error.hint}") from None
    build = arguments.build.resolve()
    library = arguments.library or compile_library(build, toolkit, arguments.architectures)
    check(library, toolkit)
    pack(library, build / "project", arguments.dist, architectures=arguments.architectures)


def compile_library(build: Path, toolkit: Toolkit, architectures: str) -> Path:
    engine = Path(wheel.output([sys.executable, "-m", "mesh_llm.engine.sources"]))
    major, _ = cuda_toolkit.fetched_release()
    options = [
        *wheel.common_options(build, engine),
        *(f"-DENGINE_SOURCE={engine}", f"-DMESH_ENGINE_VERSION={ENGINE_VERSION}", "-DGGML_CCACHE=OFF"),
        *("-DMESH_BACKENDS=cuda", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"),
        f"-DMESH_CUBLAS={CUBLAS.format(major=major)}",
        *gpus.KINDS["cuda"].options,
        *toolkit.options,
    ]
    finished = build / "finished"
    finished.mkdir(parents=True, exist_ok=True)
    os.environ.update(toolkit.environment)
    wheel.make(build / "cuda", wheel.ROOT / "native", options, ["ggml-cuda"], finished)
    return finished / "libggml-cuda.so"


def check(library: Path, toolkit: Toolkit) -> None:
    """Refuse one that an older system could not load; the driver's functions cannot be looked up here."""
    provided = glibc_floor.exports(find_wheel().module) | glibc_floor.exports(toolkit.cublas)
    driver = re.compile(rf"{library.name} needs cu[A-Z]\w*, which nothing provides")
    wrong = [flaw for flaw in glibc_floor.flaws(library, provided) if not driver.fullmatch(flaw)]
    if wrong:
        raise SystemExit("Error: " + "\n".join(wrong))


def pack(library: Path, project: Path, dist: Path, *, architectures: str) -> None:
    shutil.rmtree(project, ignore_errors=True)
    package = project / "mesh_llm_cuda"
    package.mkdir(parents=True)
    shutil.copyfile(library, package / "libggml-cuda.so")
    (package / "__init__.py").write_text('"""libggml-cuda for mesh-llm; there is no code here."""\n')
    (package / "ENGINE_VERSION").write_text(f"{ENGINE_VERSION}\n")
    major, _ = cuda_toolkit.fetched_release()
    named = {"version": __version__, "architectures": architectures.replace(";", ", ")}
    text = PROJECT.format(cublas=f"{major}.0", next_major=major + 1, **named)
    (project / "pyproject.toml").write_text(text)
    (project / "tag.py").write_text(TAG.format(platform=wheel.platform_tag()))
    environment = {"SOURCE_DATE_EPOCH": wheel.EPOCH, **os.environ}
    argv = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(dist.resolve()),
    ]
    subprocess.run(argv, check=True, env=environment, cwd=project)


if __name__ == "__main__":
    if platform.system() != "Linux":
        raise SystemExit("Error: CUDA is for Linux")
    main()
