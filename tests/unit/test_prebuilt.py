"""Which of the libraries that came with the package a processor gets."""

from __future__ import annotations

import platform
import sys
import sysconfig
from pathlib import Path

import pytest

from mesh_llm.bundle.own_wheel import best_variant
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import build, gpus, machine, prebuilt
from mesh_llm.engine.prebuilt import VARIANTS, suitable
from mesh_llm.errors import MeshError
from tests.support.building import ignore
from tests.support.kernel import Kernel

AVX2 = frozenset(["fpu", "sse4_2", "avx", "f16c", "fma", "avx2", "bmi2"])
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}
SAPPHIRE = AVX512 | {
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "avx512vbmi",
    "amx_tile",
    "amx_int8",
    "avx512_fp16",
}
BELOW = ("haswell", "sandybridge", "sse42", "x64")


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (frozenset(), ("x64",)),
        (frozenset({"sse4_2", "avx"}), ("sandybridge", "sse42", "x64")),
        (AVX2, BELOW),
        (AVX2 - {"bmi2"}, BELOW[1:]),
        (AVX2 | {"avx_vnni"}, ("alderlake", *BELOW)),
        (AVX512, ("skylakex", *BELOW)),
        (AVX512 - {"avx512bw"}, BELOW),
        (AVX512 | {"avx512_vnni", "avx512vbmi"}, ("cascadelake", "skylakex", *BELOW)),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, ("cooperlake", "cascadelake", "skylakex", *BELOW)),
        (SAPPHIRE, ("sapphirerapids", "cooperlake", "cascadelake", "skylakex", "alderlake", *BELOW)),
        (SAPPHIRE - {"amx_int8"}, ("cooperlake", "cascadelake", "skylakex", "alderlake", *BELOW)),
        (None, tuple(variant.name for variant in VARIANTS["x86_64"])),
    ],
)
def test_the_best_that_a_processor_can_run_comes_first(
    features: frozenset[str] | None, names: tuple[str, ...]
) -> None:
    assert suitable(VARIANTS["x86_64"], features) == names


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("fp asimd", "armv8.0_1"),
        ("fp asimd asimddp", "armv8.2_1"),
        ("fp asimd asimddp asimdhp i8mm", "armv8.2_2"),
        ("fp asimd asimddp asimdhp sve", "armv8.2_3"),
        ("fp asimd asimddp asimdhp sve i8mm", "armv8.6_1"),
        ("fp asimd asimddp asimdhp sve i8mm sve2", "armv8.6_2"),
    ],
)
def test_arm(features: str, best: str) -> None:
    assert suitable(VARIANTS["aarch64"], frozenset(features.split()))[0] == best


def test_a_processor_that_nobody_knows_gets_none_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    assert prebuilt.candidates("cpu") == ()
    with pytest.raises(MeshError) as refused:
        best_variant()

    assert refused.value.message == "no CPU library is made for riscv64"
    assert refused.value.hint == "leave --native out"


def test_a_feature_that_one_core_lacks_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd sve\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)

    assert machine.cpu_features() == frozenset({"fp", "asimd"})


# -- the check --------------------------------------------------------------------------------------


class Package:
    """One with libraries in it, of which some fail their check."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.flaws: dict[str, str] = {}
        self.checked: list[str] = []
        folder.mkdir()
        for name in ("ggml-mesh", "mesh-splice", *(f"ggml-cpu-{name}" for name in ("skylakex", *BELOW))):
            (folder / f"lib{name}.so").write_text(name)
        monkeypatch.setattr(prebuilt, "folder", lambda: folder)
        monkeypatch.setattr(prebuilt, "flaw", self._flaw)
        monkeypatch.setattr(prebuilt, "cpu_features", lambda: AVX512)
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(sys, "platform", "linux")

    async def _flaw(self, backend: str, path: Path, mesh: Path | None) -> str | None:
        self.checked.append(path.stem)
        return self.flaws.get(path.stem)

    def path(self, name: str) -> Path:
        return self.folder / f"lib{name}.so"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "cache"))
    return Package(tmp_path / "prebuilt", monkeypatch)


async def test_it_is_checked_once_and_then_at_hand(package: Package) -> None:
    assert set(build.at_hand().missing) == {"mesh", "cpu"}, "nothing counts before it was checked"

    first = await build.ensure(("mesh", "cpu", "splice"), ignore)
    second = await build.ensure(("mesh", "cpu", "splice"), ignore)

    wanted = {"mesh": "ggml-mesh", "cpu": "ggml-cpu-skylakex", "splice": "mesh-splice"}
    assert first.libraries == {backend: package.path(name) for backend, name in wanted.items()}
    assert second == first
    assert package.checked == ["libggml-mesh", "libggml-cpu-skylakex"]
    assert set(build.at_hand().libraries) == {"mesh", "cpu"}


async def test_one_that_fails_is_left_for_the_next_lower(package: Package) -> None:
    package.flaws = {"libggml-cpu-skylakex": "1 + 1 = 3", "libggml-cpu-haswell": "it ended with status -4"}

    built = await build.ready()

    assert built.libraries["cpu"] == package.path("ggml-cpu-sandybridge")
    assert package.checked[1:] == [f"libggml-cpu-{name}" for name in ("skylakex", "haswell", "sandybridge")]


async def test_other_bytes_and_another_processor_are_checked_again(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    await build.ready()
    package.path("ggml-cpu-skylakex").write_text("another")
    assert set(build.at_hand().missing) == {"cpu"}
    await build.ready()
    assert not build.at_hand().missing

    monkeypatch.setattr(prebuilt, "cpu_identity", lambda: "another")
    assert set(build.at_hand().missing) == {"mesh", "cpu"}


async def test_without_libggml_mesh_nothing_can_check_the_others(package: Package) -> None:
    package.flaws = {"libggml-mesh": "it ended with status 1"}

    assert (await build.ready()).libraries == {}
    assert package.checked == ["libggml-mesh"]


async def test_what_was_built_here_wins(package: Package) -> None:
    await build.ready()
    entry = build.library("cpu")
    entry.folder.mkdir(parents=True)
    entry.path.touch()

    assert build.at_hand().libraries["cpu"] == entry.path
    assert (await build.ensure(("mesh", "cpu"), ignore)).libraries["cpu"] == entry.path


async def test_a_cache_that_cannot_be_written_to_is_no_obstacle(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "file"))

    built = await build.ensure(("mesh", "cpu"), ignore)

    assert built.libraries["cpu"] == package.path("ggml-cpu-skylakex")


@pytest.mark.parametrize("packed", [True, False])
async def test_only_what_would_have_to_be_compiled_is_left_for_later(
    package: Package, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    if not packed:
        for path in package.folder.glob("libggml-cpu-*"):
            path.unlink()

    built = await build.ensure(("mesh", "cpu"), ignore, later=("cpu",))

    assert built.later == (() if packed else ("cpu",))
    assert ("cpu" in built.libraries, built.missing) == (packed, {})


async def test_what_cannot_be_compiled_is_not_left_for_later(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    for path in package.folder.glob("libggml-cpu-*"):
        path.unlink()

    built = await build.ensure(("mesh", "cpu"), ignore, later=("cpu",))

    assert built.later == ()
    assert built.missing["cpu"].message == "there is no C++ compiler on this machine"


async def test_engine_build_compiles_whatever_came_with_the_package(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    built = await build.rebuild(ignore)

    assert (
        built.missing["cpu"].message == "cmake is needed to compile native libraries, and it is not installed"
    )
    assert "pip install cmake ninja" in (built.missing["cpu"].hint or "")


# -- a package for GPUs -------------------------------------------------------------------------------


@pytest.fixture
def cuda(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`mesh-llm-cuda` is installed, on a machine with an NVIDIA GPU; returns its folder."""
    kernel = Kernel(tmp_path / "root")
    kernel.nvidia("NVIDIA H200")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)
    folder = tmp_path / "site-packages" / "mesh_llm_cuda"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "ENGINE_VERSION").write_text(f"{ENGINE_VERSION}\n")
    (folder / "libggml-cuda.so").write_text("cuda")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


async def test_a_library_for_gpus_is_used_after_its_check(cuda: Path, package: Package) -> None:
    assert build.usual() == ("mesh", "cpu", "cuda")

    built = await build.ready()

    assert built.libraries["cuda"] == cuda / "libggml-cuda.so"
    assert prebuilt.of_package(built.libraries["cuda"])
    assert package.checked[-1] == "libggml-cuda"
    assert (await build.ensure(build.usual(), ignore)).libraries == built.libraries
    assert package.checked.count("libggml-cuda") == 1


async def test_one_for_gpus_that_fails_is_not_compiled_unasked(cuda: Path, package: Package) -> None:
    package.flaws = {"libggml-cuda": "it finds no GPU that it can use"}

    built = await build.ensure(build.usual(), ignore)

    assert set(built.libraries) == {"mesh", "cpu"}
    assert built.missing["cuda"].message == (
        "ggml-cuda of the package mesh-llm-cuda does not work on this machine"
    )
    assert "mesh-llm engine build --cuda" in (built.missing["cuda"].hint or "")


def test_one_of_another_engine_does_not_count(cuda: Path) -> None:
    (cuda / "ENGINE_VERSION").write_text("1.0\n")

    assert build.usual() == ("mesh", "cpu")


def test_without_its_gpu_or_beside_vulkan_it_is_not_used(
    cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.want(("vulkan",))
    assert build.usual() == ("mesh", "cpu", "vulkan")

    gpus.want(())
    monkeypatch.setattr(gpus, "ROOT", tmp_path / "empty")
    assert build.usual() == ("mesh", "cpu")
