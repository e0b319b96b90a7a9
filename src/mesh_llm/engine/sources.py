"""The engine's own sources, which native libraries are compiled from.

They come from the sdist that belongs to the pinned wheel, checked against its
hash, and are unpacked once into the cache. Run as a module it prints where.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION
from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.packages import pip_download_source
from mesh_llm.errors import BuildFailed, MeshError
from mesh_llm.home import cache_folder
from mesh_llm.types import ProgressSink

ENGINE_SDIST_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
ENGINE_SDIST_ROOT = f"{ENGINE_PACKAGE}-{ENGINE_VERSION}/thirdparty/llama.cpp/"


_PARTS = ("ggml/", "include/", "common/", "LICENSE")
"""Of llama.cpp's tree: what is compiled, and the headers of what our libraries stand in for."""
_UNPACKING = 2
"""Counts the changes to what is unpacked, so that a cache from before is not taken for a whole one."""


def native_folder() -> Path:
    """Our own C++: inside the package when installed from a wheel, beside src/ in a clone."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "native"
    return inside if inside.is_dir() else package.parent.parent / "native"


def sources_tree() -> Path:
    """Where the engine's sources are, or will be."""
    return cache_folder() / "sources" / f"{ENGINE_PACKAGE}-{ENGINE_VERSION}-{_UNPACKING}"


async def engine_sources(progress: ProgressSink) -> Path:
    """The llama.cpp tree of the engine, fetched and unpacked if need be."""
    tree = sources_tree()
    folder = tree.parent
    if tree.is_dir():
        return tree
    folder.mkdir(parents=True, exist_ok=True)
    async with file_lock(folder / "lock", waiting_for="the engine's sources"):
        if not tree.is_dir():
            for left in folder.glob("incoming-*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix="incoming-") as scratch:
                archive = await pip_download_source(
                    f"{ENGINE_PACKAGE}=={ENGINE_VERSION}",
                    Path(scratch),
                    sha256=ENGINE_SDIST_SHA256,
                    what="Engine sources",
                    progress=progress,
                )
                unpacked = await asyncio.to_thread(_unpack, archive, Path(scratch) / "tree")
                # The rename is what makes it count: an interrupted run leaves a scratch folder only.
                unpacked.rename(tree)
    return tree


def _unpack(archive: Path, target: Path) -> Path:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != ENGINE_SDIST_SHA256:
        raise BuildFailed(
            f"{archive.name} is not the file this version was made for (sha256 {found[:12]}…)",
            hint="the package index, or a proxy before it, serves an altered file; do not use it",
        )
    wanted = tuple(f"{ENGINE_SDIST_ROOT}{part}" for part in _PARTS)
    target.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(wanted):
                member.name = member.name.removeprefix(ENGINE_SDIST_ROOT)
                tar.extract(member, target, filter="data")
    # ggml's CMake file configures a pkg-config template that the sdist leaves out; we never install it.
    (target / "ggml" / "ggml.pc.in").touch()
    return target


def main() -> None:
    try:
        tree = asyncio.run(engine_sources(lambda progress: None))
    except MeshError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(tree)


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


if __name__ == "__main__":
    main()
