"""GPUs on Linux: which are here, what the engine needs to use them, and which of that a person has built.

The engine's wheel holds code for CPUs alone there (on macOS it has Metal). For
a GPU, `mesh-llm engine build --cuda` compiles ggml's own backend with the toolkit of the GPU's
maker. That is for a person to ask for: it takes many minutes, and NVIDIA's toolkit is fetched where there
is none (`cuda_toolkit`). What was asked for once is built and loaded from then on, until
`mesh-llm engine build --no-gpu`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mesh_llm.engine.machine import platform_name
from mesh_llm.errors import BuildFailed
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder

GPU_BUILD_JOB_BYTES = 2_000_000_000
"""A guess: what the compiler takes for the largest of ggml's templates."""


ROOT = Path("/")
"""Of the files by which a kernel tells its devices; tests have one of their own."""

DROP = "mesh-llm engine build --no-gpu"


@frozen
class Kind:
    """One way to GPUs. ggml's name for it makes the option (--cuda), CMake's switch (GGML_CUDA) and the
    library (libggml-cuda)."""

    name: str
    drives: str
    """In a sentence: the GPUs that it is for."""
    registry: str
    """ggml's name for what the library registers."""
    tools: tuple[str, ...]
    """Programs that compile for it."""
    folders: tuple[str, ...]
    """Where their packages put them, beside the PATH."""
    header: str | None
    """Below an include folder; where it is missing, the tools alone do not do."""
    declares: str
    """What the header has to have in it: older ones do not."""
    wants: str
    mend: str
    sign: str
    """By which the kernel shows such a GPU."""
    options: tuple[str, ...] = ()
    """CMake's."""

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def command(self) -> str:
        return f"mesh-llm engine build {self.option}"


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="cuda",
            drives="NVIDIA GPU",
            registry="CUDA",
            tools=("nvcc",),
            folders=("/usr/local/cuda/bin", "/opt/cuda/bin"),
            header="cublas_v2.h",
            declares="",
            wants="there is no CUDA compiler (nvcc) with cuBLAS on this machine",
            mend="sudo apt install nvidia-cuda-toolkit, or NVIDIA's own cuda-toolkit; nvcc is looked for on "
            "the PATH and in /usr/local/cuda/bin",
            sign="/dev/nvidia0",
            # For matrices cut into pieces over GPUs, which no plan of ours has: one library less to miss.
            options=("-DGGML_CUDA_NCCL=OFF",),
        ),
        Kind(
            name="hip",
            drives="AMD GPU",
            registry="ROCm",
            tools=("hipcc",),
            folders=("/opt/rocm/bin",),
            header=None,
            declares="",
            wants="there is no ROCm compiler (hipcc) on this machine",
            mend="install AMD's rocm-hip-sdk, hipblas and rocblas; hipcc is looked for on the PATH and in "
            "/opt/rocm/bin",
            sign="/dev/kfd",
        ),
        Kind(
            name="vulkan",
            drives="GPU with a Vulkan driver",
            registry="Vulkan",
            tools=("glslc",),
            folders=(),
            header="vulkan/vulkan_core.h",
            declares="VK_EXT_layer_settings",
            wants="there is no shader compiler (glslc) with Vulkan's headers, 1.3.272 or newer, on this "
            "machine",
            mend="sudo apt install glslc libvulkan-dev spirv-headers, on Debian 13, Ubuntu 24.04 or newer; "
            "or name a Vulkan SDK in VULKAN_SDK",
            sign="/dev/dri/renderD128",
        ),
    )
}


@frozen
class Gpu:
    name: str
    kinds: tuple[str, ...]
    """That can drive it, the best one first."""


# -- what is here ---------------------------------------------------------------------------------


def found() -> tuple[Gpu, ...]:
    """The GPUs that the kernel shows. Files are read, nothing is started."""
    return (*_nvidia(), *_rendering())


def _nvidia() -> Iterator[Gpu]:
    """By what the driver tells, else by its device files; a driver just loaded has not made them yet."""
    kinds = ("cuda", "vulkan")
    told = sorted((ROOT / "proc/driver/nvidia/gpus").glob("*/information"))
    for file in told:
        yield Gpu(name=_field(_text(file), "Model") or "NVIDIA GPU", kinds=kinds)
    if not told:
        shown = [file for file in (ROOT / "dev").glob("nvidia*") if file.name[len("nvidia") :].isdigit()]
        # Windows' own driver, passed on into WSL2, has neither.
        if not shown and (ROOT / "dev/dxg").exists():
            shown = list((ROOT / "usr/lib/wsl/lib").glob("libcuda.so.1"))
        yield from (Gpu(name="NVIDIA GPU", kinds=kinds) for _ in shown)


def _rendering() -> Iterator[Gpu]:
    """AMD's and Intel's, by their device files for rendering and by what PCI says of these.

    NVIDIA's have them, too, and have been counted. Of Intel's those in the processor
    are left out, which sit on the first bus: they are no faster than it is.
    """
    for file in sorted((ROOT / "dev/dri").glob("renderD*")):
        device = ROOT / "sys/class/drm" / file.name / "device"
        vendor, model = (_text(device / name).strip().removeprefix("0x") for name in ("vendor", "device"))
        if vendor == "1002":
            kinds = ("hip", "vulkan") if (ROOT / "dev/kfd").exists() else ("vulkan",)
            yield Gpu(name=f"AMD GPU {model}", kinds=kinds)
        elif vendor == "8086" and not device.resolve().name.startswith("0000:00:"):
            yield Gpu(name=f"Intel GPU {model}", kinds=("vulkan",))


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """Of lines like `Model:  NVIDIA H200`."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def identity(kind: str) -> str:
    """Changes with the models of GPUs that a library for them is compiled for."""
    return "\n".join(sorted({gpu.name for gpu in found() if kind in gpu.kinds}))


@frozen
class Idle:
    """GPUs of one model that the engine has no library for."""

    name: str
    count: int
    kind: str

    @property
    def command(self) -> str:
        return KINDS[self.kind].command


def idle(gpus: Iterable[Gpu], built: Collection[str]) -> tuple[Idle, ...]:
    unused = Counter((gpu.name, gpu.kinds[0]) for gpu in gpus if not set(gpu.kinds) & set(built))
    return tuple(Idle(name=name, count=count, kind=kind) for (name, kind), count in unused.items())


def idle_text(unused: Collection[Idle]) -> str:
    """One line for the person who started a node, and may not know."""
    names = ", ".join(one.name if one.count == 1 else f"{one.count} × {one.name}" for one in unused)
    commands = " and ".join(dict.fromkeys(one.command for one in unused))
    return f"{names} not used: {commands} builds what the engine needs"


# -- what can be compiled ---------------------------------------------------------------------------


def check(kind: Kind, *, fetched: bool = False) -> None:
    """Say what is missing for a library, before anything is compiled; `fetched`: its toolkit will be."""
    if not any(kind.name in gpu.kinds for gpu in found()):
        raise BuildFailed(
            f"there is no {kind.drives} on this machine, or its driver is not loaded (no {kind.sign})",
            hint="mesh-llm engine info lists the GPUs that are here and not used",
        )
    if not fetched and tool(kind) is None:
        raise BuildFailed(kind.wants, hint=kind.mend)


def tool(kind: Kind) -> str | None:
    """The compiler of a toolkit that is here, and complete."""
    tools = [shutil.which(name, path=search_path(kind)) for name in kind.tools]
    return tools[0] if all(tools) and _has_header(kind, tools) else None


def search_path(kind: Kind) -> str:
    """A PATH on which the toolkit is found, by us and by CMake."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *kind.folders))


def _has_header(kind: Kind, tools: Iterable[str | None]) -> bool:
    if kind.header is None:
        return True
    folders = [ROOT / "usr/include", ROOT / "usr/local/include"]
    if sdk := os.environ.get("VULKAN_SDK"):
        folders.append(Path(sdk) / "include")
    for path in (*tools, *(f"{folder}/tool" for folder in kind.folders)):
        # The tool may be a link into the toolkit, which has its headers beside its programs.
        toolkit = Path(path or "/").resolve().parent.parent
        folders += [toolkit / "include", *toolkit.glob("targets/*/include")]
    return any(
        (file := folder / kind.header).is_file() and kind.declares in _text(file) for folder in folders
    )


def jobs(cores: int, memory_bytes: int) -> int:
    """Compilers to run at once: for a GPU they take memory, and a machine that swaps compiles for hours."""
    return max(1, min(cores, memory_bytes // GPU_BUILD_JOB_BYTES))


# -- what a person has asked for ----------------------------------------------------------------------


def wanted() -> tuple[str, ...]:
    """Kinds that were built here, with this version of the engine or an earlier one."""
    try:
        names = json.loads(_record().read_text())["kinds"]
        return tuple(name for name in KINDS if name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def usual() -> tuple[str, ...]:
    """Of these, the ones that have a GPU here: a cache may be shared with other machines."""
    present = {kind for gpu in found() for kind in gpu.kinds}
    return tuple(kind for kind in wanted() if kind in present)


def beside(kind: str, others: Iterable[str]) -> tuple[str, ...]:
    """The kinds to have when `kind` is asked for.

    Vulkan drives the same GPUs as the other two: with both, each GPU would be there
    twice, and its memory be planned with twice.
    """
    kept = {other for other in others if (other == "vulkan") == (kind == "vulkan")}
    return tuple(name for name in KINDS if name in kept | {kind})


def want(kinds: Iterable[str]) -> None:
    """Build and load these from now on, and no others."""
    record = _record()
    if not (names := list(kinds)):
        record.unlink(missing_ok=True)
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    scratch = record.with_name(f".{record.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps({"kinds": names}) + "\n")
        scratch.replace(record)
    finally:
        with suppress(OSError):
            scratch.unlink()


def _record() -> Path:
    """Beside the folders of versions, as it outlives them."""
    return cache_folder() / "native" / f"gpus-{platform_name()}.json"


def broken_text(kind: str, why: str) -> str:
    """Of a library that was built and does not load any more."""
    mend = f"{KINDS[kind].command} rebuilds it, {DROP} removes it"
    return f"libggml-{kind} no longer works: {why}; {mend}"
