"""Which GPUs a machine has, from the files of a kernel that is not there, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine import build, gpus
from mesh_llm.engine.build import Built
from mesh_llm.engine.gpus import GPU_BUILD_JOB_BYTES, KINDS, Gpu, Idle
from mesh_llm.errors import BuildFailed
from mesh_llm.local.hardware import keeps_to_cpu, without_gpus
from tests.support.kernel import Kernel

H200 = Gpu(name="NVIDIA H200", kinds=("cuda", "vulkan"))
RADEON = Gpu(name="AMD GPU 744c", kinds=("hip", "vulkan"))
NOTHING = Built(libraries={}, missing={})


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path / "root")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    return kernel


def toolkit(folder: Path, *programs: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for program in programs:
        (folder / program).write_text("#!/bin/sh\n")
        (folder / program).chmod(0o755)


# -- the table --------------------------------------------------------------------------------------


def test_a_kinds_name_is_in_its_option_and_command() -> None:
    assert {name: (kind.option, kind.command) for name, kind in KINDS.items()} == {
        "cuda": ("--cuda", "mesh-llm engine build --cuda"),
        "hip": ("--hip", "mesh-llm engine build --hip"),
        "vulkan": ("--vulkan", "mesh-llm engine build --vulkan"),
    }


def test_every_kind_has_a_mend_and_a_registry() -> None:
    assert {kind.registry for kind in KINDS.values()} == {"CUDA", "ROCm", "Vulkan"}
    assert all(kind.mend and kind.tools and kind.sign.startswith("/dev/") for kind in KINDS.values())


# -- what is here -----------------------------------------------------------------------------------


def test_a_machine_without_gpus(kernel: Kernel) -> None:
    assert gpus.found() == ()


def test_the_driver_names_its_gpus(kernel: Kernel) -> None:
    kernel.nvidia("NVIDIA H200")
    kernel.nvidia("NVIDIA H200")

    assert gpus.found() == (H200, H200)


def test_device_files_do_where_the_driver_is_silent(kernel: Kernel) -> None:
    kernel.file("dev/nvidia0")
    kernel.file("dev/nvidia1")
    kernel.file("dev/nvidiactl")
    kernel.file("dev/nvidia-uvm")

    assert [gpu.name for gpu in gpus.found()] == ["NVIDIA GPU", "NVIDIA GPU"]


def test_windows_passes_its_gpu_on(kernel: Kernel) -> None:
    kernel.file("dev/dxg")
    assert gpus.found() == ()

    kernel.file("usr/lib/wsl/lib/libcuda.so.1")

    assert [gpu.kinds for gpu in gpus.found()] == [("cuda", "vulkan")]


@pytest.mark.parametrize(
    ("vendor", "device", "slot", "compute", "expected"),
    [
        ("1002", "744c", "0000:03:00.0", True, [RADEON]),
        ("1002", "744c", "0000:03:00.0", False, [Gpu(name="AMD GPU 744c", kinds=("vulkan",))]),
        ("8086", "e20b", "0000:03:00.0", False, [Gpu(name="Intel GPU e20b", kinds=("vulkan",))]),
        ("8086", "a780", "0000:00:02.0", False, []),
        ("10de", "2335", "0000:41:00.0", False, []),
        ("1af4", "1050", "0000:00:01.0", False, []),
    ],
    ids=["amd", "amd without compute", "intel", "intel in the processor", "nvidia counted before", "virtual"],
)
def test_who_made_a_device_for_rendering(
    kernel: Kernel, vendor: str, device: str, slot: str, compute: bool, expected: list[Gpu]
) -> None:
    kernel.rendering(vendor, device, slot)
    if compute:
        kernel.file("dev/kfd")

    assert list(gpus.found()) == expected


def test_what_pci_does_not_tell_is_no_gpu(kernel: Kernel) -> None:
    kernel.file("dev/dri/renderD128")

    assert gpus.found() == ()


def test_a_library_is_named_after_the_models_it_is_for(kernel: Kernel) -> None:
    kernel.nvidia("NVIDIA H200")
    one = build.library("cuda").folder
    kernel.nvidia("NVIDIA H200")
    two_alike = build.library("cuda").folder
    kernel.nvidia("NVIDIA L4")

    assert one == two_alike != build.library("cuda").folder


def test_idle_are_those_that_no_library_drives() -> None:
    here = (H200, H200, RADEON)

    assert gpus.idle(here, ()) == (
        Idle(name="NVIDIA H200", count=2, kind="cuda"),
        Idle(name="AMD GPU 744c", count=1, kind="hip"),
    )
    assert [one.name for one in gpus.idle(here, ("mesh", "cpu", "cuda"))] == ["AMD GPU 744c"]
    assert gpus.idle(here, ("vulkan",)) == ()


def test_one_line_says_what_to_type() -> None:
    assert gpus.idle_text(gpus.idle((H200, H200, RADEON), ())) == (
        "2 × NVIDIA H200, AMD GPU 744c not used: mesh-llm engine build --cuda and "
        "mesh-llm engine build --hip builds what the engine needs"
    )


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cuda", "there is no NVIDIA GPU on this machine, or its driver is not loaded (no /dev/nvidia0)"),
        ("hip", "there is no AMD GPU on this machine, or its driver is not loaded (no /dev/kfd)"),
        (
            "vulkan",
            "there is no GPU with a Vulkan driver on this machine, or its driver is not loaded "
            "(no /dev/dri/renderD128)",
        ),
    ],
)
def test_nothing_is_compiled_for_a_gpu_that_is_not_here(kernel: Kernel, kind: str, message: str) -> None:
    with pytest.raises(BuildFailed) as refused:
        gpus.check(KINDS[kind])

    assert refused.value.message == message


@pytest.mark.parametrize(
    ("kind", "message", "package"),
    [
        ("cuda", "there is no CUDA compiler (nvcc) with cuBLAS on this machine", "nvidia-cuda-toolkit"),
        ("hip", "there is no ROCm compiler (hipcc) on this machine", "rocm-hip-sdk"),
        (
            "vulkan",
            "there is no shader compiler (glslc) with Vulkan's headers, 1.3.272 or newer, on this machine",
            "glslc",
        ),
    ],
)
def test_a_missing_toolkit_is_named_with_its_package(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str, package: str
) -> None:
    kernel.nvidia("NVIDIA H200")
    kernel.rendering("1002", "744c", "0000:03:00.0")
    kernel.file("dev/kfd")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BuildFailed) as refused:
        gpus.check(replace(KINDS[kind], folders=()))

    assert refused.value.message == message
    assert package in (refused.value.hint or "")


def test_a_toolkit_on_the_path_will_do(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.nvidia("NVIDIA H200")
    toolkit(tmp_path / "bin", "nvcc", "glslc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    cuda = replace(KINDS["cuda"], folders=())

    assert gpus.tool(cuda) is None, "a compiler without cuBLAS will not do"
    gpus.check(cuda, fetched=True)
    kernel.file("../include/cublas_v2.h")
    gpus.check(cuda)
    assert gpus.tool(cuda) == str(tmp_path / "bin" / "nvcc")
    with pytest.raises(BuildFailed, match="Vulkan's headers"):
        gpus.check(KINDS["vulkan"])
    kernel.file("usr/include/vulkan/vulkan_core.h", "#define VK_VERSION_1_3 1\n")
    with pytest.raises(BuildFailed, match=r"1\.3\.272 or newer"):
        gpus.check(KINDS["vulkan"])
    kernel.file("usr/include/vulkan/vulkan_core.h", "#define VK_EXT_layer_settings 1\n")
    gpus.check(KINDS["vulkan"])


# -- jobs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "memory_jobs", "expected"), [(16, 60, 16), (16, 3.5, 3), (8, 0.2, 1), (1, 60, 1), (4, 0, 1)]
)
def test_compilers_fit_into_memory_and_cores(cores: int, memory_jobs: float, expected: int) -> None:
    assert gpus.jobs(cores, int(memory_jobs * GPU_BUILD_JOB_BYTES)) == expected


def test_jobs_are_bounded_for_gpus_unless_a_person_says_how_many(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL", raising=False)
    monkeypatch.setattr(build, "cores", lambda: 16)
    monkeypatch.setattr(build, "available_memory", lambda: 5 * GPU_BUILD_JOB_BYTES)

    assert build._parallel(build.library("cuda")) == ["--parallel", "5"]
    assert build._parallel(build.library("cpu")) == []
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "12")
    assert build._parallel(build.library("cuda")) == []


# -- the usual --------------------------------------------------------------------------------------


def test_the_usual_is_what_was_asked_for_and_has_a_gpu(kernel: Kernel) -> None:
    kernel.nvidia("NVIDIA H200")
    assert build.usual() == ("mesh", "cpu")

    gpus.want(("cuda", "hip"))

    assert gpus.wanted() == ("cuda", "hip")
    assert build.usual() == ("mesh", "cpu", "cuda"), "there is no AMD GPU here"
    assert set(build.at_hand().missing) == {"mesh", "cpu", "cuda"}


def test_a_record_that_is_not_ours_asks_for_nothing(kernel: Kernel) -> None:
    gpus.want(("cuda",))
    record = gpus._record()
    for text in ("", "[]", "{}", '{"kinds": 7}', '{"kinds": ["metal"]}', "\udcff"):
        record.write_text(text, errors="surrogateescape")
        assert gpus.wanted() == ()


def test_each_gpu_is_there_once() -> None:
    assert gpus.beside("cuda", ()) == ("cuda",)
    assert gpus.beside("hip", ("cuda",)) == ("cuda", "hip")
    assert gpus.beside("vulkan", ("cuda", "hip")) == ("vulkan",)
    assert gpus.beside("cuda", ("vulkan",)) == ("cuda",)


def test_dropping_takes_libraries_and_failures_and_leaves_the_rest(kernel: Kernel) -> None:
    kernel.nvidia("NVIDIA H200")
    gpus.want(("cuda",))
    entries = {name: build.library(name) for name in ("cpu", "cuda")}
    for entry in entries.values():
        entry.folder.mkdir(parents=True)
        entry.path.touch()
        entry.failure.touch()

    assert build.drop_gpus() == ("cuda",)

    assert build.usual() == ("mesh", "cpu")
    assert not entries["cuda"].folder.exists()
    assert not entries["cuda"].failure.exists()
    assert entries["cpu"].built
    assert entries["cpu"].failure.exists()
    assert build.drop_gpus() == ()


# -- what a node says -------------------------------------------------------------------------------


def said(home: Path, built: Built = NOTHING, unusable: dict[str, str] | None = None, **options: Any) -> str:
    config = NodeConfig(home=home, **options)
    return "\n".join(without_gpus(config, built, unusable or {}))


def test_a_node_says_that_a_gpu_is_idle(kernel: Kernel, tmp_path: Path) -> None:
    assert said(tmp_path) == ""
    kernel.nvidia("NVIDIA H200")

    assert said(tmp_path) == (
        "Engine: NVIDIA H200 not used: mesh-llm engine build --cuda builds what the engine needs"
    )


@pytest.mark.parametrize(
    "options", [{"devices": ("none",)}, {"devices": ("CPU",)}, {"gpu_layers": 0}, {"bin_dir": Path("/own")}]
)
def test_nobody_is_told_who_wants_no_gpu_or_has_an_engine(
    kernel: Kernel, tmp_path: Path, options: dict[str, Any]
) -> None:
    kernel.nvidia("NVIDIA H200")

    assert said(tmp_path, **options) == ""
    assert keeps_to_cpu(NodeConfig(home=tmp_path, **options)) is ("bin_dir" not in options)


def test_a_library_that_is_used_is_no_news(kernel: Kernel, tmp_path: Path) -> None:
    kernel.nvidia("NVIDIA H200")

    assert said(tmp_path, Built(libraries={"cuda": tmp_path}, missing={})) == ""


def test_a_library_that_no_longer_loads_has_two_mends(kernel: Kernel, tmp_path: Path) -> None:
    kernel.nvidia("NVIDIA H200")
    built = Built(libraries={"cuda": tmp_path}, missing={})

    assert said(tmp_path, built, {"cuda": "libcudart.so.13: no such file"}) == (
        "Engine: libggml-cuda no longer works: libcudart.so.13: no such file; mesh-llm engine build --cuda "
        "rebuilds it, mesh-llm engine build --no-gpu removes it"
    )


def test_a_library_that_could_not_be_built_again(kernel: Kernel, tmp_path: Path) -> None:
    kernel.nvidia("NVIDIA H200")
    built = Built(libraries={}, missing={"cuda": BuildFailed("no nvcc", hint="install it")})

    assert said(tmp_path, built) == "Engine: without libggml-cuda: no nvcc (install it)"
