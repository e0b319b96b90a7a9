"""Brings the files that go with the mesh's model: a host without its projector would take no images."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from mesh_llm.config import NodeConfig
from mesh_llm.errors import MeshError
from mesh_llm.home import models_folder
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.local.side_files import SideFiles
from mesh_llm.mesh_settings import ModelSettings, SideFile
from mesh_llm.peer_fetch.model_fetch import Sources, Wanted, fetch
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.tasks import NotWanted, while_wanted
from mesh_llm.types import Event, EventSink, Fingerprint, ProgressSink

RETRY_S = 10.0
"""After a file could not be had: whoever has it may be on its way back."""
LOOK_S = 1.0
"""Between two looks, at least."""


class SideFileSupply:
    def __init__(
        self,
        *,
        config: NodeConfig,
        files: SideFiles,
        model_files: ModelFiles,
        settings: Callable[[], ModelSettings | None],
        sources: Callable[[Fingerprint], Sources],
        digests: PieceHashes,
        tell: EventSink,
        progress: ProgressSink,
    ) -> None:
        self._config = config
        self._files = files
        self._model_files = model_files
        self._settings = settings
        self._sources = sources
        self._digests = digests
        self._tell = tell
        self._progress = progress
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """The mesh's settings, or what members have, may have changed."""
        self._wake.set()

    def wanted(self) -> tuple[SideFile, ...]:
        """Those that this node would compute with, here or not."""
        settings = self._settings()
        if settings is None:
            return ()
        return self._files.wanted(settings, hosts=self._model_files.files(settings.fingerprint) is not None)

    def projector(self) -> SideFile | None:
        """Of these, the one that lets the model see."""
        settings = self._settings()
        return next((file for file in self.wanted() if settings and file == settings.projector), None)

    async def find(self) -> None:
        """On this machine."""
        settings = self._settings()
        model = self._model_files.facts(settings.fingerprint) if settings is not None else None
        await self._files.find(self.wanted(), model.files[0] if model is not None else None)

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Bring whatever the mesh's owners choose. Returns only by being cancelled."""
        held: list[Path | None] | None = None
        while True:
            await self.find()
            for file in self._missing():
                # What has come of one that is given up is kept.
                with suppress(NotWanted):
                    await while_wanted(
                        self._bring(file),
                        f"fetch of {file.name}",
                        wake=self._wake,
                        is_wanted=partial(self._is_wanted, file),
                    )
            if held != (held := [self._files.path(file) for file in self.wanted()]):
                on_change()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._missing() else None):
                    await self._wake.wait()
            # Members change all the time, and each look goes through a folder.
            await asyncio.sleep(LOOK_S)
            self._wake.clear()

    def _is_wanted(self, file: SideFile) -> bool:
        return file in self.wanted()

    def _missing(self) -> list[SideFile]:
        if self._config.no_fetch:
            return []
        return [file for file in self.wanted() if self._files.path(file) is None]

    async def _bring(self, file: SideFile) -> None:
        fingerprint = Fingerprint(file.digest)
        sources = self._sources(fingerprint)
        if not sources():
            return

        async def verify(paths: tuple[Path, ...]) -> Fingerprint:
            return fingerprint  # of the manifest, by which every piece was checked

        try:
            (path,) = await fetch(
                Wanted(
                    fingerprint=fingerprint, name=file.name, digest=file.digest, size_bytes=file.size_bytes
                ),
                models_folder(),
                sources=sources,
                verify=verify,
                progress=self._progress,
                events=self._tell,
                digests=self._digests,
            )
        except MeshError as error:
            self._tell(Event(kind="fetch", text=f"{error.message}; trying again"))
            return
        self._files.keep(file, path)
