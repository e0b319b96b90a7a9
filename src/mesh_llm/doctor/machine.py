"""Python, packages, engine, native libraries, GPUs, memory, limits, clock."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

from mesh_llm.defaults import ENGINE_PACKAGE
from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding, broken, ok, warning
from mesh_llm.engine import build
from mesh_llm.engine import gpus as engine_gpus
from mesh_llm.engine import machine as this_machine
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.process import run
from mesh_llm.errors import EngineMissing, MeshError
from mesh_llm.third_party import texts_missing

PYTHON_LEAST = (3, 11)
MEMORY_LEAST_BYTES = 1_000_000_000
"""A small model with a short context takes less; anything of use takes more."""
FILES_LEAST = 1024
"""Open files of a node: a few dozen of its own, then one or two for each client, peer and link."""
UDP_BUFFER_LEAST_BYTES = 212_992
"""What Linux comes with."""
OLDEST_TIME_S = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
"""A clock that says less has lost its battery."""
TOOL_S = 5.0
"""For a program of the system's that only reads something."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:==\s*([\w.]+))?")
_INSTALL = "pip install 'mesh-llm[engine]'"
_NO_LINKS = "without it a node neither lends its memory to others nor splits a model over them"


def python(context: CheckContext) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < PYTHON_LEAST:
        yield broken(
            f"Python {version} is too old",
            why="mesh-llm needs Python 3.11 or newer",
            mend="install python3.11 or newer, then install mesh-llm with it",
        )
    elif sys.maxsize < 2**32:
        yield broken(
            f"Python {version} is a 32-bit program",
            why="the engine exists for 64-bit machines only",
            mend="install a 64-bit Python",
        )
    else:
        yield ok(f"Python {version} on {platform.system()} {platform.release()}, {platform.machine()}")
    if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        yield warning(
            "this system's C library is not glibc",
            why="the engine and other packages come as binaries for glibc",
            mend="use a distribution with glibc, such as Debian, in a container or a virtual machine",
        )


def command(context: CheckContext) -> Iterator[Finding]:
    found, folder = shutil.which("mesh-llm"), sysconfig.get_path("scripts")
    mend = f'export PATH="{folder}:$PATH", in your shell\'s start-up file'
    if found is None:
        yield warning(
            "mesh-llm is not on the PATH",
            why="hints and guides name the command without its folder",
            mend=mend,
        )
    elif Path(found).resolve().parent != Path(folder).resolve():
        yield warning(
            f"{found} is another installation than this one in {folder}",
            why="hints and guides would run that one, which may be of another version",
            mend=f"remove it, or {mend}",
        )
    else:
        yield ok(f"mesh-llm is {found}")


def packages(context: CheckContext) -> Iterator[Finding]:
    wanted = [text for text in importlib.metadata.requires("mesh-llm") or [] if _counts(text, context.client)]
    fine = True
    for text in wanted:
        parts = _REQUIREMENT.match(text)
        assert parts is not None
        name, pinned = parts[1], parts[2]
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        # The engine has a check of its own, which says more.
        if name == ENGINE_PACKAGE or (found is not None and pinned in (None, found)):
            continue
        fine = False
        yield broken(
            f"the package {name} is missing"
            if found is None
            else f"the package {name} is {found}; {pinned} is needed",
            why="a node does not start without it",
            mend=f"{_python()} -m {_INSTALL}, or make setup in a clone",
        )
    if fine:
        yield ok(f"{len(wanted)} packages that it needs are installed")


def _counts(requirement: str, client: bool) -> bool:
    return "extra ==" not in requirement or ("engine" in requirement.split("extra ==")[1] and not client)


def _python() -> str:
    return sys.executable or "python3"


def compiler(context: CheckContext) -> Iterator[Finding]:
    if (found := build.compiler()) is not None:
        yield ok(f"C++ compiler {found}")
        return
    yield warning(
        "there is no C++ compiler",
        why="native libraries that are not built yet cannot be built: a node computes more slowly, and alone",
        mend="xcode-select --install" if sys.platform == "darwin" else "sudo apt install g++",
    )


# -- the engine -----------------------------------------------------------------------------------


async def engine(context: CheckContext) -> list[Finding]:
    if context.client:
        return [ok("a lite client needs no engine")]
    try:
        wheel = find_wheel()
    except EngineMissing as error:
        return [
            broken(error.message, why="nothing is computed on this machine without it", mend=error.hint or "")
        ]
    found = [ok(f"{ENGINE_PACKAGE} {wheel.version} (llama.cpp build {wheel.build_number})")]
    built = build.at_hand()
    found += _unbuilt(built)
    try:
        described = await describe(built.libraries)
    except MeshError as error:
        mend = error.hint or "mesh-llm engine build --force"
        return [*found, broken(error.message, why="the engine cannot be started with it", mend=mend)]
    for name, why in described["unusable"].items():
        kind = engine_gpus.KINDS[name]
        found.append(
            broken(
                f"libggml-{name} no longer works: {why}",
                why=f"the {kind.drives} is not used; its driver or toolkit may have changed",
                mend=f"{kind.command} (rebuilds it), or {engine_gpus.DROP}",
            )
        )
    for sentence in (*described["features_off"], *texts_missing(wheel.module)):
        found.append(
            warning(
                sentence,
                why="this engine is not quite the one that was tested",
                mend=f"{_python()} -m {_INSTALL}",
            )
        )
    if built.libraries:
        names = ", ".join(f"ggml-{name}" for name in built.libraries)
        found.append(ok(f"native libraries {names}: {' '.join(described['cpu_features'])}"))
    for device in described["devices"]:
        found.append(ok(f"{device['name']}: {device['description']}, {this_machine.memory_text(device)}"))
    return found


def _unbuilt(built: build.Built) -> Iterator[Finding]:
    for name in built.missing:
        failure = build.library(name).failure
        why = _NO_LINKS if name == "mesh" else "the wheel's own code is used, which is slower"
        if failure.is_file():
            reason = failure.read_text(errors="replace").splitlines()[0]
            yield broken(
                f"libggml-{name} could not be built: {reason}", why=why, mend="mesh-llm engine build"
            )
        elif build.compiler() is None:
            tell = broken if name == "mesh" else warning
            mend = "sudo apt install g++, then mesh-llm engine build"
            yield tell(f"libggml-{name} is not built, and there is no compiler", why=why, mend=mend)
        else:
            yield warning(
                f"libggml-{name} is not built yet",
                why="the next start of a node builds it, which takes a minute or two",
                mend="mesh-llm engine build",
            )


# -- GPUs -----------------------------------------------------------------------------------------


def gpus(context: CheckContext) -> Iterator[Finding]:
    found = engine_gpus.found()
    driver = _driver(context.root)
    if found:
        yield ok(f"{len(found)} GPU: {', '.join(gpu.name for gpu in found)}{driver}")
    for idle in engine_gpus.idle(found, build.at_hand().libraries):
        yield warning(
            f"{idle.name} is not used",
            why="a GPU computes many times faster than the processor",
            mend=idle.command,
        )
    if not any("cuda" in gpu.kinds for gpu in found) and (count := _nvidia_on_bus(context.root)):
        yield warning(
            f"{count} NVIDIA GPU without a driver that is loaded",
            why="without its driver a GPU cannot be used",
            mend="sudo apt install nvidia-driver, then restart the machine",
        )
    elif not found:
        yield ok("no GPU: the processor computes")


def _driver(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module\D*([\d.]+)", text)
    return f", NVIDIA driver {match[1]}" if match else ""


def _nvidia_on_bus(root: Path) -> int:
    def says(device: Path, name: str) -> str:
        try:
            return (device / name).read_text().strip()
        except OSError:
            return ""

    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        says(each, "vendor") == "0x10de" and says(each, "class").startswith("0x03") for each in devices
    )


async def gpu_users(context: CheckContext) -> list[Finding]:
    """Other programs that hold memory of a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [ok("no nvidia-smi: other programs' GPU memory is not known")]
    query = "--query-compute-apps=pid,process_name,used_memory"
    finished = await run([program, query, "--format=csv,noheader,nounits"], timeout_s=TOOL_S)
    if finished.status != 0:
        last = (finished.output or finished.errors or ("",))[-1].strip()
        return [
            broken(
                f"nvidia-smi fails: {last or f'status {finished.status}'}",
                why="a driver that does not answer does not compute; perhaps it was updated while in use",
                mend="restart the machine, or reinstall the driver",
            )
        ]
    ours = _own_processes(context)
    others = [found for line in finished.output if (found := _user(line)) and found[0] not in ours]
    return [
        warning(
            f"{name} (pid {pid}) holds {megabytes} MB of GPU memory",
            why="that memory is missing for models",
            mend=f"kill {pid}, or end that program",
        )
        for pid, name, megabytes in others
    ] or [ok("no other program holds GPU memory")]


def _user(line: str) -> tuple[int, str, str] | None:
    parts = [part.strip() for part in line.split(",")]
    return (int(parts[0]), parts[1], parts[2]) if len(parts) == 3 and parts[0].isdigit() else None


def _own_processes(context: CheckContext) -> set[int]:
    """The running node's engine and worker; other nodes' are other programs."""
    pid = context.node.network.get("pid") if context.node is not None else None
    if not isinstance(pid, int):
        return set()
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}


# -- memory, limits, clock ------------------------------------------------------------------------


def memory(context: CheckContext) -> Iterator[Finding]:
    usable, total = this_machine.available_memory(), this_machine.total_memory()
    text = f"{usable / 1e9:.1f} of {total / 1e9:.1f} GB of memory are free for models"
    if usable >= MEMORY_LEAST_BYTES or (context.node is not None and not context.client):
        yield ok(text)
        return
    largest = ", ".join(f"{name} (pid {pid}, {size / 1e9:.1f} GB)" for size, name, pid in _largest())
    yield (broken if usable == 0 else warning)(
        text,
        why="a model that does not fit waits for other machines, or is refused",
        mend=f"close what you do not need; the largest: {largest}",
    )


def _largest() -> list[tuple[int, str, int]]:
    held = []
    for process in psutil.process_iter(["memory_info", "name"]):
        info = process.info
        if info["memory_info"] is not None:
            held.append((info["memory_info"].rss, info["name"] or "?", process.pid))
    return sorted(held, reverse=True)[:3]


def limits(context: CheckContext) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FILES_LEAST:
        yield warning(
            f"this user's programs may open {files} files",
            why="each client, peer and link takes one or two: a busy node refuses connections",
            mend=f"ulimit -n {4 * FILES_LEAST}, before mesh-llm is started",
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield warning(
            f"this user's programs may address {space / 1e9:.1f} GB",
            why="model files are mapped into memory as a whole: larger ones fail to load",
            mend="ulimit -v unlimited, before mesh-llm is started",
        )
    names = [name for name in ("rmem_max", "wmem_max") if _too_small(context.root, name)]
    if names:
        settings = " ".join(f"net.core.{name}={UDP_BUFFER_LEAST_BYTES}" for name in names)
        yield warning(
            f"UDP buffers are smaller than usual ({', '.join(names)})",
            why="packets of other nodes are dropped when many come at once, and links slow down",
            mend=f"sudo sysctl -w {settings}",
        )
    if 0 <= files < FILES_LEAST or space != resource.RLIM_INFINITY or names:
        return
    yield ok(f"{'unlimited' if files < 0 else files} open files, memory without a limit, usual UDP buffers")


def _too_small(root: Path, name: str) -> bool:
    try:
        return int((root / "proc/sys/net/core" / name).read_text()) < UDP_BUFFER_LEAST_BYTES
    except (OSError, ValueError):
        return False


async def clock(context: CheckContext) -> list[Finding]:
    now = context.now()
    shown = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    why = "invites expire by the clock, and other nodes refuse what was signed in their future"
    mend = "sudo timedatectl set-ntp true" if sys.platform == "linux" else "sudo sntp -sS time.apple.com"
    if now < OLDEST_TIME_S:
        return [broken(f"the clock says {shown}", why=why, mend=mend)]
    if (program := shutil.which("timedatectl")) is not None:
        argv = [program, "show", "--property=NTPSynchronized", "--value"]
        try:
            said = (await run(argv, timeout_s=TOOL_S)).output
        except MeshError:
            said = ()
        if list(said) == ["no"]:
            return [warning(f"the clock ({shown}) is not set by the network", why=why, mend=mend)]
    return [ok(f"the clock says {shown}")]
