"""The draft of a mesh, as its other members find it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.errors import ModelError
from mesh_llm.local.draft_model import DraftModels
from mesh_llm.mesh_settings import Draft
from mesh_llm.models import eagle3
from mesh_llm.types import Fingerprint, ModelFacts
from tests.support import planning
from tests.support.stores import Home


class ModelFiles:
    def __init__(self) -> None:
        self.drafts: dict[Fingerprint, Path | None] = {}

    async def look(self, path: Path) -> ModelFacts:
        return planning.model()


@pytest.mark.parametrize("name", ["qwen2.5:0.5b", "qwen2.5-0.5B-instruct-q4_k_m"])
async def test_a_draft_is_found_by_the_name_that_the_mesh_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home = Home(tmp_path)
    for key, value in home.env.items():
        monkeypatch.setenv(key, value)
    file = (
        home.add_ollama("library/qwen2.5/0.5b")
        if ":" in name
        else home.add("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf")
    )
    model_files: Any = ModelFiles()
    drafts = DraftModels(config=NodeConfig(home=tmp_path), model_files=model_files, tell=lambda event: None)
    draft = Draft(name=name, fingerprint=planning.FINGERPRINT, weight_bytes=1, cache_bytes=1, compute_bytes=1)
    settings = planning.settings(draft=draft)

    assert await drafts.find(settings)
    assert drafts.file(settings) == file
    assert not await drafts.find(settings)


async def test_a_draft_that_reads_the_layers_of_its_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    for key, value in home.env.items():
        monkeypatch.setenv(key, value)
    file = home.add("dflash-llama.gguf")
    model_files: Any = ModelFiles()
    monkeypatch.setattr(model_files, "look", looks_like("dflash"))
    config = NodeConfig(home=tmp_path, draft=str(file))
    drafts = DraftModels(config=config, model_files=model_files, tell=lambda event: None)

    with pytest.raises(ModelError, match="cannot draft: it reads the layers of its model"):
        await drafts.choose(planning.model())


HEAD: dict[str, Any] = {
    "architecture": "eagle3",
    "read_layers": (2, 20, 37),
    "read_width": planning.model().hidden,
}


@pytest.mark.parametrize(
    ("target", "head", "reason"),
    [
        ({"architecture": "mamba"}, {}, "the engine does not tell what the layers of a mamba model read"),
        ({}, {"read_layers": (2, 20)}, r"does not name the 3 layers that it reads \(eagle3.target_layers\)"),
        ({}, {"read_width": 7}, "it reads layers of width 7 instead of"),
        ({}, {"read_layers": (2, 20, 40)}, "it reads layer 40, and the last one is 39"),
    ],
)
def test_an_eagle3_head_of_another_model(target: dict[str, Any], head: dict[str, Any], reason: str) -> None:
    model = replace(planning.model(), architecture="llama")
    assert eagle3.mismatch(model, replace(model, **HEAD)) is None
    found = eagle3.mismatch(replace(model, **target), replace(model, **(HEAD | head)))
    assert found is not None
    assert re.search(reason, found)


def test_an_eagle3_head_may_read_what_comes_after_the_last_layer_where_the_engine_has_it() -> None:
    head = replace(planning.model(), **(HEAD | {"read_layers": (2, 20, 40)}))
    assert eagle3.mismatch(replace(planning.model(), architecture="gpt-oss"), head) is None


def looks_like(architecture: str) -> Callable[[Path], Awaitable[ModelFacts]]:
    async def look(path: Path) -> ModelFacts:
        return replace(planning.model(), architecture=architecture)

    return look
