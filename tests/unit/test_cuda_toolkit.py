"""CUDA's compiler from the index: what is named, which drivers it is refused for, how it goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mesh_llm.engine import cuda_toolkit
from mesh_llm.engine.cuda_toolkit import Driver, check_driver, fetched_release, parts
from mesh_llm.errors import BuildFailed

LINE = re.compile(r"nvidia-[a-z-]+==[0-9.]+( --hash=sha256:[0-9a-f]{64}){2}")
H200 = ("NVIDIA H200", (9, 0))
P40 = ("Tesla P40", (6, 1))


def test_every_package_is_pinned_with_a_hash_for_each_processor() -> None:
    compiler, cublas = parts()

    assert all(LINE.fullmatch(line) for line in (*compiler.lines, *cublas.lines))
    names = [line.split("==")[0] for line in compiler.lines]
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"} <= set(names)
    assert [line.split("==")[0] for line in cublas.lines] == ["nvidia-cublas"]
    assert fetched_release()[0] == 13


def test_another_lock_file_has_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path))
    before = [part.folder for part in parts()]
    (tmp_path / "lock").write_text(cuda_toolkit.LOCK.read_text().replace("nvcc==13.2.86", "nvcc==13.3.33"))
    monkeypatch.setattr(cuda_toolkit, "LOCK", tmp_path / "lock")

    compiler, cublas = parts()

    assert compiler.folder != before[0]
    assert cublas.folder == before[1]


@pytest.mark.parametrize("release", [(12, 0), (12, 9), (13, 0)])
def test_a_driver_runs_what_is_not_of_a_later_major_version(release: tuple[int, int]) -> None:
    check_driver(Driver(release=(13, 0), gpus=(H200,)), release)
    check_driver(Driver(release=(13, 0), gpus=(H200,)), (13, 2))


@pytest.mark.parametrize(
    ("driver", "message", "hint"),
    [
        (None, "the library of the NVIDIA driver (libcuda.so.1) is missing or does not load", "--gpus all"),
        (
            Driver(release=(12, 4), gpus=(H200,)),
            "the NVIDIA driver runs CUDA up to 12.4, the compiler is of 13.2",
            "update the driver to version 580 or newer, or install a CUDA 12 toolkit",
        ),
        (
            Driver(release=(13, 0), gpus=(H200, P40)),
            "Tesla P40: too old for CUDA 13.2, which begins with compute capability 7.5",
            "install a CUDA 12 toolkit",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_mend(driver: Driver | None, message: str, hint: str) -> None:
    with pytest.raises(BuildFailed) as refused:
        check_driver(driver, (13, 2))

    assert refused.value.message == message
    assert hint in (refused.value.hint or "")


def test_cublas_stays_when_the_compiler_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path))
    for part in parts():
        (part.folder / "nvidia").mkdir(parents=True)

    cuda_toolkit.drop_compiler()
    assert [part.folder.is_dir() for part in parts()] == [False, True]
    cuda_toolkit.drop()
    assert list((tmp_path / "cuda").iterdir()) == []
    cuda_toolkit.drop()
