"""Files that go with the mesh's model: what its creator has of them, and where they lie on this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mesh_llm import file_stamp
from mesh_llm.config import NodeConfig
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import ModelError
from mesh_llm.home import models_folder
from mesh_llm.local.modalities import modalities
from mesh_llm.mesh_settings import Adapter, ModelExtras, ModelSettings, SideFile
from mesh_llm.models.adapters import check_adapter
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.types import Fingerprint, HeldModel, HostingMode, ModelFacts

log = logging.getLogger(__name__)


class SideFiles:
    """Told apart by their digests: a name is only where to look first."""

    def __init__(self, *, config: NodeConfig, digests: PieceHashes, busy: Callable[[], bool]) -> None:
        self._config = config
        self._digests = digests
        self._busy = busy
        self._paths: dict[str, Path] = {}
        """By digest."""
        self._stamps: dict[Path, str] = {}
        """Of files as they were read: a digest is not believed of any other ones."""

    # -- the creator's -------------------------------------------------------------------------

    async def choose(self, model: ModelFacts, config: NodeConfig | None = None) -> ModelExtras:
        """Of a mesh of this model: the projector that was named, or lies beside it, and the adapters.

        `config`: what was asked for another model than the default one.
        """
        config = config or self._config
        path = modalities(config, model).projector
        await self.check(model, config)
        return ModelExtras(
            projector=await self.described(path) if path is not None else None,
            adapters=tuple(
                [Adapter(file=await self.described(path), scale=scale) for path, scale in config.lora]
            ),
        )

    async def check(self, model: ModelFacts, config: NodeConfig | None = None) -> None:
        """Raise where an adapter is none, or does not go with the model."""
        lora = (config or self._config).lora
        base = await read_gguf(model.files[0]) if lora else {}
        for path, _ in lora:
            check_adapter(path, await read_gguf(path), base)

    async def described(self, path: Path) -> SideFile:
        """A file as others can look for it; all of it is read, once."""
        digest = await self._known_digest(path)
        self._paths[digest] = path
        return SideFile(name=path.name.removesuffix(".gguf"), size_bytes=path.stat().st_size, digest=digest)

    async def _known_digest(self, path: Path) -> str:
        before = file_stamp.stamp(path)
        digest = await self._digest(path)
        self._stamps[path] = before
        return digest

    async def _digest(self, path: Path) -> str:
        async def quiet(hashed_bytes: int) -> None: ...

        try:
            file = await self._digests.of(path, busy=self._busy, beat=quiet)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        return Manifest(stem="", piece_bytes=self._digests.piece_bytes, files=(file,)).digest

    # -- everybody's ---------------------------------------------------------------------------

    def wanted(self, settings: ModelSettings, *, hosts: bool) -> tuple[SideFile, ...]:
        """What this node would compute with, whether it has it or not. `hosts`: it has all of the model."""
        config, projector = self._config, settings.projector
        hosts = hosts and config.hosting is not HostingMode.NEVER
        needed = (projector,) if hosts and projector is not None and config.mmproj is None else ()
        return (*needed, *(adapter.file for adapter in settings.adapters))

    async def find(self, wanted: Iterable[SideFile], model: Path | None) -> None:
        """Look for those that are not known yet, beside the model and in the models folder."""
        folders = {models_folder(), *(() if model is None else (model.parent,))}
        folders |= {path.parent for path, _ in self._config.lora}
        for file in wanted:
            if self.path(file) is not None:
                continue
            for path in await asyncio.to_thread(_of_size, file, folders):
                try:
                    if await self._known_digest(path) == file.digest:
                        self._paths[file.digest] = path
                        break
                except ModelError as error:
                    log.info("not the mesh's file=%s: %s", path, error.message)

    def keep(self, file: SideFile, path: Path) -> None:
        self._stamps[path] = file_stamp.stamp(path)
        self._paths[file.digest] = path

    def path(self, file: SideFile | None) -> Path | None:
        return self.paths_of([file.digest]).get(file.digest) if file is not None else None

    def paths_of(self, digests: Iterable[str]) -> dict[str, Path]:
        """Of those that are here."""
        return {
            digest: path for digest in digests if (path := self._paths.get(digest)) and self._is_here(path)
        }

    def _is_here(self, path: Path) -> bool:
        return path.is_file() and self._stamps.get(path) == file_stamp.stamp(path)

    def stamps(self, paths: Iterable[Path]) -> dict[str, str]:
        """Of these files as they were read."""
        return {str(path): self._stamps[path] for path in paths if path in self._stamps}

    def held(self, settings: ModelSettings) -> tuple[HeldModel, ...]:
        """Those of the mesh's that are here, as members are told."""
        return tuple(
            HeldModel(fingerprint=Fingerprint(file.digest), name=file.name, size_bytes=file.size_bytes)
            for file in settings.side_files
            if self.path(file) is not None
        )


def _of_size(file: SideFile, folders: Iterable[Path]) -> list[Path]:
    """Files that may be it, that of its name first."""
    found = []
    for path in (path for folder in folders for path in folder.glob("*.gguf")):
        with suppress(OSError):  # a link to nowhere
            if path.stat().st_size == file.size_bytes:
                found.append(path)
    return sorted(found, key=lambda path: (path.stem != file.name, path.name))
