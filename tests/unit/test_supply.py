"""Where the mesh's model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.errors import MeshError
from mesh_llm.node.supply import Supply
from mesh_llm.types import Fingerprint, MeshSettings, ModelFacts
from tests.support import planning

THEN = planning.model()
NOW = planning.model(fingerprint=Fingerprint("another"))


@dataclass(kw_only=True)
class Entry:
    settings: MeshSettings
    is_creator: bool = False

    def check_model(self, model: ModelFacts) -> None:
        if not self.is_creator and model.fingerprint != self.settings.fingerprint:
            raise MeshError("another file")


class Shelf:
    """Where the mesh's model lies, too."""

    async def find(self, settings: MeshSettings) -> ModelFacts:
        return NOW

    def all_files(self) -> dict[Fingerprint, tuple[Path, ...]]:
        return {}


def supply(home: Path, *, creator: bool = False, model: str | None = None) -> Supply:
    unused: Any = None
    entry: Any = Entry(settings=planning.settings(fingerprint=NOW.fingerprint), is_creator=creator)
    shelf: Any = Shelf()
    return Supply(
        config=NodeConfig(home=home, model=model),
        shelf=shelf,
        entry=entry,
        mesh=unused,
        busy=bool,
        tell=unused,
        doing=unused,
        progress=unused,
        on_model=unused,
    )


async def test_a_member_that_returns_takes_what_the_mesh_serves_by_now(tmp_path: Path) -> None:
    assert await supply(tmp_path).obtain(THEN) is NOW


async def test_what_a_member_was_given_has_to_be_the_meshs(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="another file"):
        await supply(tmp_path, model="mine.gguf").obtain(THEN)


async def test_a_creators_file_is_the_meshs(tmp_path: Path) -> None:
    assert await supply(tmp_path, creator=True).obtain(THEN) is THEN
