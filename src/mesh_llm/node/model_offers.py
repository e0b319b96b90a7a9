"""What members are told and given of this node's models: those of the mesh, and no other on its disks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.errors import ModelError
from mesh_llm.home import cache_folder
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.local.side_files import SideFiles
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.node.joining import Joining
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.serve import FileServer
from mesh_llm.peer_fetch.throttle import Throttle
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport.network import Stream
from mesh_llm.types import Fingerprint, HeldModel, HeldPart, ModelFacts, NodeId


class ModelOffers:
    def __init__(
        self,
        *,
        config: NodeConfig,
        model_files: ModelFiles,
        joining: Joining,
        mesh: Mesh,
        busy: Callable[[], bool],
    ) -> None:
        self._model_files = model_files
        self._joining = joining
        self._mesh = mesh
        self._busy = busy
        self.digests = PieceHashes(cache_folder() / "digests")
        self.side_files = SideFiles(config=config, digests=self.digests, busy=busy)
        self._server = FileServer(models=self._offered, digests=self.digests, throttle=Throttle(busy=busy))

    def tell(self) -> None:
        self._mesh.publish(**self.told())

    def told(self) -> dict[str, Any]:
        """As fields of `NodeFacts`."""
        held: list[HeldModel] = []
        parts: list[HeldPart] = []
        for settings in self._models():
            held += self._model_files.held(settings.fingerprint)
            held += self.side_files.held(settings)
            if (part := self._model_files.held_part(settings.fingerprint)) is not None:
                parts.append(part)
        default = self._default_part(parts)
        others = tuple(part for part in parts if part is not default)
        return {"models": tuple(held), "part": default, "also_parts": others}

    def _default_part(self, parts: list[HeldPart]) -> HeldPart | None:
        settings = self._joining.settings
        return next((part for part in parts if settings and part.fingerprint == settings.fingerprint), None)

    def _models(self) -> tuple[ModelSettings, ...]:
        settings = self._joining.settings
        return settings.models if settings is not None else ()

    def _offered(self) -> dict[Fingerprint, tuple[Path, ...]]:
        """What members are given. The same rule: whoever guesses another fingerprint gets nothing by it."""
        offered = {}
        for settings in self._models():
            if (files := self._model_files.files(settings.fingerprint)) is not None:
                offered[settings.fingerprint] = tuple(files)
            for file in settings.side_files:
                if (path := self.side_files.path(file)) is not None:
                    offered[Fingerprint(file.digest)] = (path,)
        return offered

    async def serve_file(self, origin: NodeId, header: dict[str, Any], stream: Stream) -> None:
        await self._server.answer(stream, header, origin=origin)

    async def digest_of(self, model: ModelFacts) -> str:
        """Of all bytes of a model's files, for the mesh's settings. They are read once, and it is kept."""

        async def quiet(hashed_bytes: int) -> None: ...

        try:
            files = [await self.digests.of(path, busy=self._busy, beat=quiet) for path in model.files]
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
        return Manifest(stem="", piece_bytes=self.digests.piece_bytes, files=tuple(files)).digest
