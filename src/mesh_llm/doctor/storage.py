"""The home, its keys, disks, model files and their hashes."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from mesh_llm.defaults import FETCH_SPARE_BYTES, INSPECT_AT_ONCE
from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding, broken, ok, warning
from mesh_llm.doctor.thread import in_thread
from mesh_llm.download import checksum
from mesh_llm.engine import build
from mesh_llm.engine.inspect import read_headers
from mesh_llm.engine.library import find_wheel
from mesh_llm.errors import EngineMissing, MeshError, ModelError
from mesh_llm.home import Home, cache_folder, models_folder
from mesh_llm.models.stores import LocalModel, Places, search

DISK_LEAST_BYTES = 50_000_000
"""For logs and documents of a node, and a little more."""
HASHING_S = 10.0
"""For comparing model files with their hashes: a few gigabytes on an SSD."""
SECRETS = ("identity", "mesh.json", "service.env")
"""Files in a home that nobody else may read."""


# -- the home -------------------------------------------------------------------------------------


def home(context: CheckContext) -> Iterator[Finding]:
    where = context.home
    problems = [*_unwritable(where.path), *_open_to_others(where), *_damaged(where)]
    yield from problems
    if not problems:
        yield ok(
            f"{where.path} {'is private and can be written to' if where.path.exists() else 'will be made'}"
        )


def _unwritable(path: Path) -> Iterator[Finding]:
    folder = _existing(path)
    elsewhere = "mesh-llm --home DIR, or MESH_LLM_HOME=DIR, with a folder of your own"
    try:
        if folder.stat().st_uid != os.getuid() and folder == path:
            yield broken(
                f"{path} belongs to another user",
                why="the node's key and its sockets lie there",
                mend=f"sudo chown -R {os.getuid()} {shlex.quote(str(path))}, or {elsewhere}",
            )
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # A full disk has a check of its own.
        if error.errno != errno.ENOSPC:
            yield broken(
                f"{folder} cannot be written to: {error.strerror}",
                why="a node keeps its key, its mesh and its logs there",
                mend=elsewhere,
            )


def _open_to_others(home: Home) -> Iterator[Finding]:
    for path in (home.run_folder, *(home.path / name for name in SECRETS)):
        try:
            mode = path.stat().st_mode
        except OSError:
            continue
        if mode & 0o077:
            wanted = "700" if stat.S_ISDIR(mode) else "600"
            yield broken(
                f"{path} is open to other users of this machine ({stat.filemode(mode)})",
                why="whoever reads it can act as this node, or invite others into its mesh",
                mend=f"chmod {wanted} {shlex.quote(str(path))}",
            )


def _damaged(home: Home) -> Iterator[Finding]:
    try:
        home.read_mesh()
        if (home.path / "identity").exists():
            home.secret()
    except MeshError as error:
        yield broken(error.message, why="the node does not start with it", mend=error.hint or "")
    except OSError as error:
        mend = f"chmod u+r {shlex.quote(str(error.filename))}"
        yield broken(
            f"{error.filename} cannot be read: {error.strerror}", why="a node reads it first", mend=mend
        )


def config(context: CheckContext) -> Iterator[Finding]:
    if context.config_problem is not None:
        error = context.config_problem
        yield broken(error.message, why="a node does not start with it", mend=error.hint or "mend that line")
    else:
        there = context.home.config_file.exists()
        yield ok(f"{context.home.config_file} {'is fine' if there else 'is not there; none is needed'}")


# -- disks ----------------------------------------------------------------------------------------


def disk(context: CheckContext) -> Iterator[Finding]:
    unbuilt = bool(build.at_hand().missing) and not context.client
    wanted = (
        ("home", context.home.path, DISK_LEAST_BYTES, "choose another one with MESH_LLM_HOME"),
        ("models", models_folder(), FETCH_SPARE_BYTES, "choose another one with MESH_LLM_MODELS"),
        (
            *("cache", cache_folder(), build.BUILD_DISK_BYTES if unbuilt else DISK_LEAST_BYTES),
            "choose another one with MESH_LLM_CACHE",
        ),
    )
    for what, folder, least, otherwise in wanted:
        free = shutil.disk_usage(_existing(folder)).free
        if free >= least:
            yield ok(f"{free / 1e9:.1f} GB free for the {what} ({folder})")
            continue
        tell = broken if free < DISK_LEAST_BYTES else warning
        yield tell(
            f"{free / 1e6:.0f} MB free for the {what} ({folder})",
            why=f"less than {least / 1e6:.0f} MB: downloads, builds and logs fail on a full disk",
            mend=f"free some space (du -sh {shlex.quote(str(folder))}), or {otherwise}",
        )


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


# -- models ---------------------------------------------------------------------------------------


async def models(context: CheckContext) -> list[Finding]:
    found = await in_thread(lambda: search(Places.from_environment()))
    problems = [_shard_missing(model) for model in found.models if model.missing]
    whole = [model for model in found.models if not model.missing]
    problems += [_damage(f"{skipped.path}: {skipped.reason}", skipped.path) for skipped in found.skipped]
    problems += [finding async for finding in _unreadable(whole)]
    hashed, unhashed, differing = await in_thread(lambda: _compared(whole))
    problems += differing
    rest = f"; for {unhashed} more there was no time: sha256sum -c FILE.sha256" if unhashed else ""
    models = f"{len(whole)} {'model' if len(whole) == 1 else 'models'} on this disk"
    files = "1 file as its hash says" if hashed == 1 else f"{hashed} files as their hashes say"
    return [*problems, ok(f"{models}, {files}{rest}")]


def _shard_missing(model: LocalModel) -> Finding:
    return broken(
        f"{model.name} lacks {len(model.missing)} of its files ({model.missing[0]})",
        why="a model in several files runs only with all of them",
        mend=f"mesh-llm download {shlex.quote(model.name)}, or copy the missing file beside {model.path}",
    )


def _damage(what: str, path: Path) -> Finding:
    return broken(
        what,
        why="the engine refuses it, or answers nonsense",
        mend=f"rm {shlex.quote(str(path))}, then download it again",
    )


async def _unreadable(models: Sequence[LocalModel]) -> AsyncIterator[Finding]:
    """By their headers, of the newest: one child reads so many."""
    try:
        find_wheel()
    except EngineMissing:
        return
    newest = sorted(models, key=lambda model: -model.path.stat().st_mtime)[:INSPECT_AT_ONCE]
    index = 0
    async for answer in read_headers([model.path for model in newest]):
        if isinstance(answer, ModelError):
            yield _damage(answer.message, newest[index].path)
        index += 1


def _compared(models: Sequence[LocalModel]) -> tuple[int, int, list[Finding]]:
    """How many files were compared with the hash beside them, how many not for want of time, what differs."""
    files = [file for model in models for file in model.files if checksum.recorded(file) is not None]
    files.sort(key=lambda file: file.stat().st_size)
    deadline = time.monotonic() + HASHING_S
    differing: list[Finding] = []
    for done, file in enumerate(files):
        # One that would take longer than all the time there is, at the speed of a plain disk, is not begun.
        if time.monotonic() > deadline or file.stat().st_size > HASHING_S * 300e6:
            return done, len(files) - done, differing
        try:
            checksum.verify(file)
        except ModelError as error:
            differing.append(_damage(error.message, file))
    return len(files), 0, differing
