"""Notices model files that are replaced while the node runs: what they hold then is not the mesh's model.

A file that was renamed over leaves its bytes to whoever has mapped them, and an
engine goes on with these. One that was written in its place does not: engines
and workers that have mapped it are ended. Either way nothing new is begun with
the file before it has been checked anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesh_llm import file_stamp
from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.mesh_settings import MeshSettings, ModelSettings
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.model_service import ModelService
from mesh_llm.tasks import task_group
from mesh_llm.types import Event, EventSink, Fingerprint, ModelFacts
from mesh_llm.worker.lending import Lending

LOOK_S = 1.0
"""Between two looks at the files. One that stays as it is from one to the next is complete."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Changed:
    """A model whose files are others than those that were read."""

    facts: ModelFacts
    seen: dict[str, str]
    is_checked: bool = False


class FileWatch:
    def __init__(
        self,
        *,
        model_files: ModelFiles,
        offers: ModelOffers,
        lending: Lending,
        settings: Callable[[], MeshSettings | None],
        service: Callable[[Fingerprint], ModelService | None],
        tell: EventSink,
        on_files: Callable[[], None],
    ) -> None:
        """`on_files`: a model has gone, or come back."""
        self._model_files = model_files
        self._offers = offers
        self._lending = lending
        self._settings = settings
        self._service = service
        self._tell = tell
        self._on_files = on_files
        self._changed: dict[Fingerprint, _Changed] = {}

    async def run(self) -> None:
        """Returns only by being cancelled."""
        async with task_group() as group:
            while True:
                await asyncio.sleep(LOOK_S)
                for fingerprint in self.look():
                    group.create_task(self._check(self._changed[fingerprint]), name="check of a model file")

    def look(self) -> list[Fingerprint]:
        """Models whose files are to be checked: they have changed, and are complete by now."""
        for facts in self._model_files.known:
            if (reason := self._model_files.changed(facts.fingerprint)) is not None:
                self._lose(facts, reason)
        complete = []
        for fingerprint, changed in list(self._changed.items()):
            now = file_stamp.stamps(map(Path, changed.seen))
            if now != changed.seen:
                changed.seen, changed.is_checked = now, False
            elif not changed.is_checked and all(now.values()):
                changed.is_checked = True
                complete.append(fingerprint)
        return complete

    def _lose(self, facts: ModelFacts, reason: str) -> None:
        fingerprint = facts.fingerprint
        rewritten = file_stamp.is_rewritten(self._model_files.stamps(fingerprint))
        self._model_files.forget(fingerprint)
        self._changed[fingerprint] = _Changed(facts=facts, seen=file_stamp.stamps(facts.files))
        if self._wanted(fingerprint) is None:
            return
        log.warning("model file changed fingerprint=%s: %s", fingerprint, reason)
        self._say(f"{reason}; it is checked anew before anything is computed with it")
        self._offers.tell()
        if rewritten:
            self._end_uses(fingerprint, reason)
        self._on_files()

    def _end_uses(self, fingerprint: Fingerprint, reason: str) -> None:
        self._lending.spoil(fingerprint, reason)
        service = self._service(fingerprint)
        for run in service.hosting.runs if service is not None else ():
            run.give_up(EngineFailed(reason))

    async def _check(self, changed: _Changed) -> None:
        facts = changed.facts
        wanted = self._wanted(facts.fingerprint)
        if wanted is None:
            self._changed.pop(facts.fingerprint, None)
            return
        path = facts.files[0]
        try:
            is_same = await self._is_same(path, wanted)
        except (MeshError, OSError) as error:
            log.info("not the mesh's model file=%s: %s", path, error)
            is_same = False
        if self._changed.get(facts.fingerprint) is not changed:
            return
        if is_same:
            del self._changed[facts.fingerprint]
            self._say(f"{path} is {wanted.alias}, as before")
            self._offers.tell()
            self._on_files()
        elif changed.is_checked:
            # By its fingerprint it may have been found meanwhile, and used.
            was_found = self._model_files.files(facts.fingerprint) is not None
            self._model_files.refuse(facts)
            if was_found:
                self._end_uses(facts.fingerprint, f"{path} is no longer {wanted.alias}")
                self._offers.tell()
                self._on_files()
            self._say(
                f"{path} is no longer {wanted.alias}, and nothing is computed with it: put the file back, or "
                "start this node again with the one that is there"
            )

    async def _is_same(self, path: Path, wanted: ModelSettings) -> bool:
        facts = await self._model_files.look(path)
        if facts.fingerprint != wanted.fingerprint:
            return False
        # The fingerprint takes samples.
        if wanted.digest and await self._offers.digest_of(facts) != wanted.digest:
            return False
        return await self._model_files.read_if(path, wanted.fingerprint) is not None

    def _wanted(self, fingerprint: Fingerprint) -> ModelSettings | None:
        settings = self._settings()
        return settings.of(fingerprint) if settings is not None else None

    def _say(self, text: str) -> None:
        self._tell(Event(kind="model", text=text))
