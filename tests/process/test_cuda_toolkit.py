"""CUDA's compiler is fetched where there is none: with the real pip, from stand-ins on this disk."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import build, cuda_toolkit, gpus
from mesh_llm.engine.build import Library, compiler
from mesh_llm.engine.cuda_toolkit import Driver, Toolkit
from mesh_llm.engine.sources import native_folder
from mesh_llm.errors import MeshError
from tests.support.building import ignore
from tests.support.kernel import Kernel
from tools import wheel_cuda
from tools.wheel import platform_tag

CXX = compiler()
pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler on this machine")

DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int * version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int * count) { *count = 1; return 0; }
int cuDeviceGet(int * device, int index) { *device = index; return 0; }
int cuDeviceGetName(char * name, int size, int device) { name[0] = 'H'; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int * value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
"""
CONTENTS = {
    "nvidia-cuda-nvcc": {"bin/nvcc": b"#!/bin/sh\n"},
    "nvidia-cuda-runtime": {"lib/libcudart.so.13": b"", "include/cuda.h": b""},
    "nvidia-cublas": {"lib/libcublas.so.13": b"", "include/cublas_v2.h": b""},
}


class Index:
    """A folder of wheels, and a lock file that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, folder / "cuda-toolkit.lock"
        folder.mkdir()
        lines = [f"{name}==13.2.1 --hash=sha256:{self._add(name)}" for name in CONTENTS]
        self.lock.write_text("# stand-ins\n" + "\n".join(lines) + "\n")

    def _add(self, name: str) -> str:
        stem = f"{name.replace('-', '_')}-13.2.1"
        files = {f"nvidia/cu13/{path}": content for path, content in CONTENTS[name].items()}
        files[f"{stem}.dist-info/METADATA"] = (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 13.2.1\n".encode()
        )
        files[f"{stem}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        record = "".join(
            f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()
        )
        files[f"{stem}.dist-info/RECORD"] = (record + f"{stem}.dist-info/RECORD,,\n").encode()
        wheel = self.folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, content in files.items():
                entry = zipfile.ZipInfo(path)
                entry.external_attr = (0o100755 if "/bin/" in path else 0o100644) << 16
                archive.writestr(entry, content)
        return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")
    monkeypatch.setattr(cuda_toolkit, "LOCK", index.lock)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    return index


def fetch() -> Toolkit:
    return asyncio.run(cuda_toolkit.fetch(ignore))


def left(cache: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (cache / "cuda").iterdir() if path.name != "lock")


def test_it_is_fetched_once_and_whole(index: Index, cache: Path) -> None:
    toolkit = fetch()

    nvcc = Path(toolkit.environment["CUDACXX"])
    assert nvcc.is_file()
    assert os.access(nvcc, os.X_OK)
    assert (toolkit.root / "lib" / "libcudart.so").resolve().name == "libcudart.so.13"
    assert toolkit.cublas.name == "libcublas.so.13"
    assert (Path(toolkit.environment["CPATH"]) / "cublas_v2.h").is_file()
    assert left(cache) == ["compiler", "cublas"]

    for wheel in index.folder.glob("*.whl"):
        wheel.unlink()
    assert fetch() == toolkit
    cuda_toolkit.drop_compiler()
    assert left(cache) == ["cublas"]


def test_an_altered_package_is_not_unpacked(index: Index, cache: Path) -> None:
    wheel = next(index.folder.glob("nvidia_cuda_runtime*"))
    wheel.write_bytes(wheel.read_bytes() + b"more")

    with pytest.raises(MeshError) as refused:
        fetch()

    assert refused.value.message == (
        "what the package index has as CUDA's compiler is not the file that this version was made for"
    )
    assert "do not use it" in (refused.value.hint or "")
    assert left(cache) == []


def test_without_a_network_it_says_so(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")

    with pytest.raises(MeshError) as refused:
        fetch()

    assert refused.value.message == ("cannot download CUDA's compiler: the package index cannot be reached")
    assert left(cache) == []


def test_without_space_nothing_is_begun(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "FETCH_DISK_BYTES", 10**15)

    with pytest.raises(MeshError, match=r"needs 1000000\.0 GB in .*; .* GB are free") as refused:
        fetch()

    assert "MESH_LLM_CACHE" in (refused.value.hint or "")
    assert left(cache) == []


def test_what_an_earlier_run_left_half_is_not_trusted(index: Index, cache: Path) -> None:
    half = cache / "cuda" / "incoming-0"
    (half / "packages" / "nvidia").mkdir(parents=True)

    fetch()

    assert left(cache) == ["compiler", "cublas"]


# -- as a part of a build ---------------------------------------------------------------------------


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an NVIDIA GPU, without a toolkit; returns where its driver's library is to be."""
    kernel = Kernel(tmp_path / "root")
    kernel.nvidia("NVIDIA H200")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)
    bare = replace(gpus.KINDS["cuda"], folders=(), tools=("no-nvcc",))
    monkeypatch.setitem(gpus.KINDS, "cuda", bare)
    (tmp_path / "driver").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "driver"), prepend=":")
    return tmp_path / "driver" / "libcuda.so.1"


def install_driver(library: Path, version: int) -> None:
    source = library.with_suffix(".c")
    source.write_text(DRIVER.replace("VERSION", str(version)))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)


def test_the_driver_is_asked(nvidia: Path) -> None:
    install_driver(nvidia, 12080)

    assert asyncio.run(cuda_toolkit.ask_driver()) == Driver(release=(12, 8), gpus=(("H", (9, 0)),))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "the library of the NVIDIA driver (libcuda.so.1) is missing or does not load"),
        (12040, "the NVIDIA driver runs CUDA up to 12.4, the compiler is of 13.2"),
    ],
)
def test_nothing_is_fetched_for_a_driver_that_could_not_run_it(
    index: Index, cache: Path, nvidia: Path, version: int | None, message: str
) -> None:
    if version is None:
        nvidia.write_bytes(b"no library")
    else:
        install_driver(nvidia, version)

    with pytest.raises(MeshError) as refused:
        asyncio.run(build.rebuild(ignore, gpu="cuda"))

    assert refused.value.message == message
    assert not (cache / "cuda").exists()
    assert not (cache / "native").exists()


def test_a_build_takes_the_toolkit_that_was_fetched(
    index: Index,
    cache: Path,
    nvidia: Path,
    libraries: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_driver(nvidia, 13000)
    entry = build.library("mesh")
    entry.folder.parent.mkdir(parents=True, exist_ok=True)
    entry.folder.symlink_to(libraries["mesh"].parent)
    seen = []

    async def step(
        what: str, argv: list[str | Path], environment: dict[str, str], *rest: object, **more: object
    ) -> None:
        seen.append((argv, environment))
        if "--build" in argv:
            made = Path(argv[argv.index("--build") + 1]) / "lib" / "libggml-cuda.so"
            made.parent.mkdir(parents=True)
            made.touch()

    async def right(entry: Library, made: Path, mesh: Path | None) -> str | None:
        return None

    monkeypatch.setattr(build, "_step", step)
    monkeypatch.setattr(build, "_flaw", right)

    built = asyncio.run(build.ensure(("mesh", "cuda"), ignore))

    toolkit = fetch()
    assert built.libraries["cuda"].is_file()
    configured, environment = seen[0]
    assert {f"-DCUDAToolkit_ROOT={toolkit.root}", f"-DCUDA_cublas_LIBRARY={toolkit.cublas}"} <= set(
        configured
    )
    assert environment["CUDACXX"] == str(toolkit.root / "bin" / "nvcc")


# -- the package with a library in it ---------------------------------------------------------------


def test_the_package_names_what_it_needs(tmp_path: Path) -> None:
    library = tmp_path / "libggml-cuda.so"
    library.write_bytes(b"stand-in")

    for name in ("one", "two"):
        wheel_cuda.pack(library, tmp_path / name, tmp_path / f"dist-{name}", architectures="90-real")

    made, again = (next((tmp_path / f"dist-{name}").iterdir()) for name in ("one", "two"))
    assert made.name == f"mesh_llm_cuda-{__version__}-py3-none-{platform_tag()}.whl"
    assert made.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(made) as archive:
        assert archive.read("mesh_llm_cuda/libggml-cuda.so") == b"stand-in"
        assert archive.read("mesh_llm_cuda/ENGINE_VERSION").decode() == f"{ENGINE_VERSION}\n"
        metadata = archive.read(f"mesh_llm_cuda-{__version__}.dist-info/METADATA").decode()
    assert f"Requires-Dist: mesh-llm[engine]=={__version__}\n" in metadata
    assert "Requires-Dist: nvidia-cublas<14,>=13.0\n" in metadata


# -- the real one -----------------------------------------------------------------------------------


@pytest.mark.full
def test_the_fetched_compiler_makes_code_for_a_gpu(engine_sources: Path, tmp_path: Path) -> None:
    """One file of ggml's, for an H100, with neither a toolkit nor a GPU here."""
    if not all(part.folder.is_dir() for part in cuda_toolkit.parts()):
        pytest.skip("mesh-llm engine build --cuda has fetched no CUDA toolkit on this machine")
    toolkit = fetch()
    argv = ["cmake", "-S", str(native_folder()), "-B", str(tmp_path), "-G", "Ninja"]
    options = [*build._engine_options("cuda", engine_sources), *gpus.KINDS["cuda"].options, *toolkit.options]
    environment = {**os.environ, **toolkit.environment}
    subprocess.run(
        [*argv, *options, "-DCMAKE_CUDA_ARCHITECTURES=90-real"], check=True, env=environment, timeout=120
    )

    file = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/acc.cu.o"
    subprocess.run(["ninja", "-C", tmp_path, file], check=True, env=environment, timeout=240)

    assert b".nv_fatbin" in (tmp_path / file).read_bytes()
    commands = subprocess.run(
        ["ninja", "-C", tmp_path, "-t", "commands", "ggml-cuda"], check=True, capture_output=True, text=True
    )
    assert "code=[sm_90]" in commands.stdout
    link = commands.stdout.splitlines()[-1]
    assert f"-Wl,-rpath,{toolkit.cublas.parent}" in link
    assert "libcudart_static.a" in link
