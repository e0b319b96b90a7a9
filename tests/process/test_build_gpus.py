"""Libraries for GPUs: built on demand, for a GPU that is here, and never used unchecked."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh_llm.engine import build, gpus
from mesh_llm.engine.build import Library, compiler
from tests.support.building import ignore, leftovers
from tests.support.command import MESH_LLM, Ended, Running, mesh_llm
from tests.support.kernel import Kernel
from tests.support.node import SMALL, NodeProcess

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine")

ELSEWHERE = """
import sys
from dataclasses import replace
from pathlib import Path
from mesh_llm.cli.main import main
from mesh_llm.engine import cuda_toolkit, gpus
gpus.ROOT = Path(sys.argv.pop(1))
gpus.KINDS["cuda"] = replace(gpus.KINDS["cuda"], folders=())
cuda_toolkit.can_be_fetched = lambda: False
main()
"""
"""`mesh-llm` on a machine whose kernel shows other GPUs, with no toolkit but on the PATH; none is fetched."""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path / "root")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)
    return kernel


def elsewhere(kernel: Kernel, argv: Sequence[str | Path]) -> list[str | Path]:
    return [sys.executable, "-W", "error", "-c", ELSEWHERE, kernel.root, *argv[len(MESH_LLM) :]]


def engine_elsewhere(kernel: Kernel, *arguments: str, env: dict[str, str]) -> Ended:
    with Running(elsewhere(kernel, [*MESH_LLM, "engine", *arguments]), env=env) as running:
        return running.wait()


def test_a_gpu_that_is_not_here_is_built_nothing_for(kernel: Kernel, cache: Path) -> None:
    ended = engine_elsewhere(kernel, "build", "--cuda", env={"MESH_LLM_CACHE": str(cache)})

    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr == (
        "Error: there is no NVIDIA GPU on this machine, or its driver is not loaded (no /dev/nvidia0)\n"
        "Hint: mesh-llm engine info lists the GPUs that are here and not used\n"
    )
    assert not (cache / "native").exists()


def test_a_toolkit_that_is_missing_is_named(kernel: Kernel, cache: Path, tmp_path: Path) -> None:
    kernel.nvidia("NVIDIA H200")

    ended = engine_elsewhere(
        kernel, "build", "--cuda", env={"MESH_LLM_CACHE": str(cache), "PATH": str(tmp_path)}
    )

    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr.startswith(
        "Error: there is no CUDA compiler (nvcc) with cuBLAS on this machine\n"
        "Hint: sudo apt install nvidia-cuda-toolkit, or "
    )
    assert not (cache / "native").exists()


@pytest.mark.parametrize("options", [("--cuda", "--hip"), ("--vulkan", "--no-gpu")])
def test_one_kind_of_gpu_at_a_time(options: tuple[str, str]) -> None:
    ended = mesh_llm("engine", "build", *options)

    assert ended.status == 2
    assert ended.stderr.startswith(f"Error: {', '.join(options)}: choose one at a time\n")


def borrow_mesh(libraries: dict[str, Path]) -> None:
    """Into an empty cache, so that it need not be built for a test about others."""
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh cannot be built on this machine")
    entry = build.library("mesh")
    entry.folder.parent.mkdir(parents=True, exist_ok=True)
    entry.folder.symlink_to(libraries["mesh"].parent)


def install_cuda(content: bytes) -> Library:
    gpus.want(("cuda",))
    entry = build.library("cuda")
    entry.folder.mkdir(parents=True)
    entry.path.write_bytes(content)
    return entry


def install_nvcc(kernel: Kernel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not tell its release, so that no driver is asked whether it runs that."""
    (folder / "nvcc").write_text("#!/bin/sh\n")
    (folder / "nvcc").chmod(0o755)
    kernel.file("usr/include/cublas_v2.h")
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_info_tells_what_does_not_load_and_what_is_idle(
    kernel: Kernel, cache: Path, libraries: dict[str, Path]
) -> None:
    kernel.nvidia("NVIDIA H200")
    kernel.nvidia("NVIDIA H200")
    entry = install_cuda(b"no library")

    env = {"MESH_LLM_CACHE": str(cache)}
    document = json.loads(engine_elsewhere(kernel, "info", "--json", env=env).stdout)
    table = engine_elsewhere(kernel, "info", env=env)

    said = document["libraries"]["cuda"]["instead"]
    assert said.startswith(f"libggml-cuda no longer works: the engine refused to load {entry.path}: ")
    assert said.endswith(
        "; mesh-llm engine build --cuda rebuilds it, mesh-llm engine build --no-gpu removes it"
    )
    assert document["gpu_kinds"] == []
    assert document["idle_gpus"] == [
        {"name": "NVIDIA H200", "count": 2, "kind": "cuda", "command": "mesh-llm engine build --cuda"}
    ]
    assert any(device["kind"] == "cpu" for device in document["devices"])
    assert table.status == 0
    assert "idle GPU" in table.stdout
    assert "2 × NVIDIA H200: mesh-llm engine build --cuda" in table.stdout


def test_a_gpus_library_that_fails_its_test_leaves_the_earlier_one(
    kernel: Kernel,
    cache: Path,
    libraries: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads, and has no GPU: libggml-mesh under another name does as much."""
    kernel.nvidia("NVIDIA H200")
    borrow_mesh(libraries)
    earlier = install_cuda(b"as it was")
    install_nvcc(kernel, tmp_path, monkeypatch)

    async def compiled(entry: Library, sources: object, folder: Path, *rest: object, **more: object) -> Path:
        folder.mkdir()
        return Path(shutil.copy(libraries["mesh"], folder / entry.path.name))

    monkeypatch.setattr(build, "_compile", compiled)

    built = asyncio.run(build.ensure(("mesh", "cuda"), ignore, retry=True))

    assert built.missing["cuda"].message == (
        "ggml-cuda was built, but computes wrong results: it finds no GPU that it can use"
    )
    assert earlier.path.read_bytes() == b"as it was"
    assert leftovers(cache) == []


def test_a_gpus_library_is_not_used_unchecked(
    kernel: Kernel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.nvidia("NVIDIA H200")
    install_nvcc(kernel, tmp_path, monkeypatch)

    missing = asyncio.run(build.ensure(("cuda",), ignore)).missing["cuda"]

    assert missing.message == ("ggml-cuda cannot be checked without libggml-mesh, which could not be built")


def test_a_node_says_which_gpu_is_idle_and_what_to_type(kernel: Kernel, home: Path, tiny_model: Path) -> None:
    kernel.nvidia("NVIDIA H200")
    line = "Engine: NVIDIA H200 not used: mesh-llm engine build --cuda builds what the engine needs\n"

    with NodeProcess(
        *SMALL, home=home, model=tiny_model, around=lambda argv: elsewhere(kernel, argv)
    ) as node:
        node.until_ready()

    assert node.stdout.count(line) == 1


def test_a_gpu_of_this_machine_computes_right(libraries: dict[str, Path]) -> None:
    if not (kinds := set(libraries) & set(gpus.KINDS)):
        pytest.skip("no library for a GPU was built on this machine")
    for kind in kinds:
        entry = build.library(kind)
        assert asyncio.run(build._flaw(entry, entry.path, libraries["mesh"])) is None
