"""mesh-llm's own wheel for a bundle: compiled in a clone, packed again from an installation."""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import sys
import zipfile
from collections import deque
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path

from mesh_llm.bundle.locked import clone
from mesh_llm.engine import machine, prebuilt
from mesh_llm.engine.process import run
from mesh_llm.errors import BuildFailed, MeshError
from mesh_llm.types import Progress, ProgressSink

COMPILE_TIMEOUT_S = 3600.0
"""All processors' libraries, on one slow core."""
EPOCH = (2020, 1, 1, 0, 0, 0)
"""Of the files in a wheel that is packed again, so that equal files give equal bytes."""
_NOT_PACKED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
"""Written by whoever installs."""
_CPU_LIBRARY = re.compile(r"mesh_llm/prebuilt/libggml-cpu-(.+)\.(?:so|dylib)")


async def own_wheel(folder: Path, *, native: bool, progress: ProgressSink) -> Path:
    """mesh-llm's wheel, in `folder`; with `native` it has one CPU library, the best for this processor."""
    only = best_variant() if native else None
    if (root := clone()) is not None:
        return await _compile(root, folder, only, progress)
    return repack(distribution("mesh-llm"), folder, only)


def best_variant() -> str:
    known = prebuilt.VARIANTS.get(platform.machine(), ())
    suitable = prebuilt.suitable(known, machine.cpu_features())
    if not suitable:
        raise MeshError(f"no CPU library is made for {platform.machine()}", hint="leave --native out")
    return suitable[0]


async def _compile(root: Path, folder: Path, only: str | None, progress: ProgressSink) -> Path:
    lines: deque[str] = deque(maxlen=20)

    def on_line(line: str) -> None:
        lines.append(line)
        if match := re.match(r"\[(\d+)/(\d+)\]", line):
            progress(Progress(what="Compiling", done=int(match[1]), total=int(match[2]), unit="files"))

    argv = [sys.executable, "-m", "tools.wheel", "--dist", str(folder), *(["--only", only] if only else [])]
    finished = await run(argv, timeout_s=COMPILE_TIMEOUT_S, cwd=root, on_line=on_line)
    made = list(folder.glob("mesh_llm-*.whl"))
    if finished.status != 0 or not made:
        said = next((line for line in reversed(lines) if line.strip()), f"exit status {finished.status}")
        raise BuildFailed(
            f"the wheel could not be made: {said.removeprefix('Error: ')}",
            hint="make wheel shows all that is said",
        )
    return made[0]


def repack(installed: Distribution, folder: Path, only: str | None) -> Path:
    """The wheel that an installation came from; `only` names the CPU library that it keeps."""
    packed = [file for file in installed.files or () if _belongs(file, only)]
    if not any(file.match("mesh_llm/*.py") for file in packed):
        raise MeshError(
            "this mesh-llm is neither a clone nor installed from a wheel",
            hint="install it from a wheel (make wheel), or run it from a clone",
        )
    tag = _tag(installed)
    if tag.endswith("-any"):
        raise MeshError(
            "this mesh-llm was installed without native libraries, which a bundle has to carry",
            hint="install a wheel made by make wheel, or run mesh-llm bundle in a clone",
        )
    target = folder / f"mesh_llm-{installed.version}-{tag}.whl"
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(packed, key=str):
            content = _checked(file)
            _add(wheel, str(file), content)
            record.append(f"{file},sha256={_digest(content)},{len(content)}\n")
        name = f"mesh_llm-{installed.version}.dist-info/RECORD"
        _add(wheel, name, "".join([*record, f"{name},,\n"]).encode())
    return target


def _belongs(file: PackagePath, only: str | None) -> bool:
    if file.parts[0] == ".." or file.suffix == ".pyc" or file.name in _NOT_PACKED:
        return False
    library = _CPU_LIBRARY.fullmatch(str(file))
    return library is None or only in (None, library[1])


def _tag(installed: Distribution) -> str:
    found = re.search(r"^Tag: (\S+)$", installed.read_text("WHEEL") or "", re.MULTILINE)
    return found[1] if found else "py3-none-any"


def _checked(file: PackagePath) -> bytes:
    content = Path(str(file.locate())).read_bytes()
    if file.hash is not None and file.hash.value != _digest(content):
        raise MeshError(
            f"{file} was changed after mesh-llm was installed", hint="install mesh-llm again, then bundle it"
        )
    return content


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _add(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = 0o100644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    wheel.writestr(entry, content)
