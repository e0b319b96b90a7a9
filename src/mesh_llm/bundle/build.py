"""Makes a bundle: wheels for several Pythons, mesh-llm's own, install.sh, sums, and a model if wanted."""

from __future__ import annotations

import gzip
import hashlib
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.bundle.locked import lock_file, needed, pins
from mesh_llm.bundle.own_wheel import own_wheel
from mesh_llm.engine.packages import pip_download_locked
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.types import Progress, ProgressSink

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC_MINOR = 28
"""The newest glibc 2 that a package may ask for: iroh's does."""
MACOS_MAJOR = 13
INSTALL = Path(__file__).with_name("install.sh")
_TIME = 1577836800
"""Of all files in the bundle, so that equal files give equal bytes."""
_DEFLATE_LEVEL = 1
"""Wheels and models are compressed already."""


@frozen
class BundleSpec:
    target: Path
    wheel: Path | None
    """mesh-llm's own, where it is made already."""
    native: bool
    model_files: tuple[Path, ...]


def default_name() -> str:
    return f"{_stem()}.tar.gz"


def _stem() -> str:
    return f"mesh-llm-{__version__}-{platform.system().lower()}-{platform.machine()}"


async def build(spec: BundleSpec, progress: ProgressSink) -> None:
    """Write the bundle to `spec.target`; until all of it is written there is no such file."""
    if not spec.target.parent.is_dir():
        raise UsageError(f"there is no folder {spec.target.parent}", hint="name another file with -o")
    with tempfile.TemporaryDirectory(prefix=".mesh-llm-bundle-", dir=spec.target.parent) as scratch:
        root = Path(scratch) / _stem()
        wheels = root / "wheels"
        wheels.mkdir(parents=True)
        own = _copied(spec.wheel, wheels) if spec.wheel else None
        if own is None:
            own = await own_wheel(wheels, native=spec.native, progress=progress)
        for left in wheels.glob("*.tar.gz"):
            left.unlink()
        await _download(own, wheels, progress)
        _describe(root, spec.model_files)
        files = _gathered(root, spec.model_files)
        (root / "SHA256SUMS").write_text(_sums(files, progress))
        # Last: of a file that was cut off, the sums are missing.
        files["SHA256SUMS"] = root / "SHA256SUMS"
        packed = Path(scratch) / "packed"
        _pack(files, packed, progress)
        packed.replace(spec.target)


def _copied(wheel: Path, folder: Path) -> Path:
    if not wheel.is_file():
        raise UsageError(f"there is no wheel {wheel}", hint="make wheel makes one in dist/")
    version = wheel.name.split("-")[1] if wheel.name.startswith("mesh_llm-") else "unknown"
    if version != __version__:
        raise UsageError(
            f"{wheel.name} is not a wheel of mesh-llm {__version__}", hint="make wheel makes one"
        )
    return Path(shutil.copy(wheel, folder))


async def _download(own: Path, wheels: Path, progress: ProgressSink) -> None:
    locked, requires = pins(lock_file()), _requires(own)
    for done, python in enumerate(PYTHONS):
        progress(Progress(what=f"Fetching packages for Python {python}", done=done, total=len(PYTHONS)))
        wanted = wheels / "requirements.txt"
        wanted.write_text("".join(f"{pin.line()}\n" for pin in needed(requires, locked, python)))
        await pip_download_locked(wanted, wheels, python=python, platforms=platforms())
        wanted.unlink()


def _requires(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    except (zipfile.BadZipFile, StopIteration):
        raise MeshError(f"{wheel.name} is not a wheel", hint="make wheel makes one in dist/") from None


def platforms() -> tuple[str, ...]:
    """Tags of wheels that run on every machine that the bundle is for."""
    machine = platform.machine()
    if sys.platform == "darwin":
        return (f"macosx_{MACOS_MAJOR}_0_{machine}", f"macosx_{MACOS_MAJOR}_0_universal2")
    old = ("manylinux2014", "manylinux2010", "manylinux1")
    named = [*(f"manylinux_2_{minor}" for minor in range(GLIBC_MINOR, 4, -1)), *old]
    return tuple(f"{name}_{machine}" for name in named)


def glibc_minor(names: Iterable[str]) -> int:
    """The oldest glibc 2 that wheels of these names run on."""
    asked = [[int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", name)] for name in names]
    return max((min(minors) for minors in asked if minors), default=17)


def _describe(root: Path, models: Sequence[Path]) -> None:
    """What install.sh has to know, as `key value` lines."""
    wheels = sorted((root / "wheels").iterdir())
    facts = {
        "version": __version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": f"2.{glibc_minor(path.name for path in wheels)}",
        "pythons": " ".join(PYTHONS),
        "need_kb": sum(map(_unpacked_bytes, wheels)) // 1000,
        "models_kb": sum(path.stat().st_size for path in models) // 1000,
    }
    (root / "bundle.txt").write_text("".join(f"{key} {value}\n" for key, value in facts.items()))


def _unpacked_bytes(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def _gathered(root: Path, models: Sequence[Path]) -> dict[str, Path]:
    """What goes into the bundle, by its name there."""
    wheels = {f"wheels/{path.name}": path for path in sorted((root / "wheels").iterdir())}
    given = {f"models/{path.name}": path for path in models}
    return {"install.sh": INSTALL, "bundle.txt": root / "bundle.txt", **wheels, **given}


def _sums(files: dict[str, Path], progress: ProgressSink) -> str:
    lines = []
    for done, (name, path) in enumerate(files.items()):
        progress(Progress(what="Computing sums", done=done, total=len(files), unit="files"))
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def _pack(files: dict[str, Path], target: Path, progress: ProgressSink) -> None:
    with (
        target.open("wb") as file,
        gzip.GzipFile("", "wb", _DEFLATE_LEVEL, file, mtime=_TIME) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for done, (name, path) in enumerate(files.items()):
            progress(Progress(what="Packing", done=done, total=len(files), unit="files"))
            with path.open("rb") as content:
                entry = tar.gettarinfo(arcname=f"{_stem()}/{name}", fileobj=content)
                entry.mode = 0o755 if name == "install.sh" else 0o644
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = _TIME, 0, 0, "", ""
                tar.addfile(entry, content)
