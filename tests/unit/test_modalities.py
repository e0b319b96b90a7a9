"""What a model does beside text, by its files and by its node's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.local.modalities import described, held_bytes, modalities, projector_beside
from mesh_llm.mesh_settings import SideFile
from mesh_llm.types import ModelFacts
from tests.support.planning import model


def facts(folder: Path, **changes: bool) -> ModelFacts:
    return model(files=(folder / "Big-8B-Q4_K_M.gguf",), **changes)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"GGUF" + bytes(96))


@pytest.mark.parametrize(
    ("told", "asked", "embeddings", "rerank"),
    [
        ({}, {}, False, False),
        ({}, {"embeddings": True}, True, False),
        ({}, {"rerank": True}, False, True),
        ({"encodes": True}, {}, True, False),
        ({"encodes": True}, {"rerank": True}, False, True),
        ({"encodes": True, "ranks": True}, {}, False, True),
        ({"encodes": True, "ranks": True}, {"embeddings": True}, True, False),
    ],
)
def test_what_the_file_says_holds_unless_somebody_asks_for_something_else(
    tmp_path: Path, told: dict[str, bool], asked: dict[str, bool], embeddings: bool, rerank: bool
) -> None:
    can = modalities(NodeConfig(home=tmp_path, **asked), facts(tmp_path, **told))  # type: ignore[arg-type]
    assert (can.embeddings, can.rerank) == (embeddings, rerank)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        (["mmproj-Big-8B-F16.gguf"], "mmproj-Big-8B-F16.gguf"),
        (["mmproj-big-8b-Q8_0.gguf", "Other-3B-Q4_0.gguf"], "mmproj-big-8b-Q8_0.gguf"),
        (["Big-8B-mmproj-f16.gguf", "Other-3B-Q4_0.gguf"], "Big-8B-mmproj-f16.gguf"),
        (["Big-8B.mmproj-bf16.gguf"], "Big-8B.mmproj-bf16.gguf"),
        (["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-model-f16.gguf", "Big-8B-Q8_0.gguf"], "mmproj-model-f16.gguf"),
        # Whose is it?
        (["mmproj-F16.gguf", "Other-3B-Q4_0.gguf"], None),
        (["mmproj-Other-3B-F16.gguf"], None),
        (["mmproj-Big-80B-F16.gguf"], None),
        (["Other-3B-Q4_0.gguf", "mmproj.txt"], None),
        ([], None),
    ],
)
def test_a_projector_beside_the_model_is_found_by_its_name(
    tmp_path: Path, others: list[str], found: str | None
) -> None:
    put(tmp_path, "Big-8B-Q4_K_M.gguf", *others)
    expected = tmp_path / found if found else None
    assert projector_beside(tmp_path / "Big-8B-Q4_K_M.gguf") == expected


def test_shards_have_one_projector(tmp_path: Path) -> None:
    shards = [f"Big-8B-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    put(tmp_path, *shards, "mmproj-F16.gguf")
    assert projector_beside(tmp_path / shards[0]) == tmp_path / "mmproj-F16.gguf"


def test_one_that_is_found_is_told_of_and_counted(tmp_path: Path) -> None:
    put(tmp_path, "mmproj-Big-8B-F16.gguf")
    config = NodeConfig(home=tmp_path)
    text = described(config, facts(tmp_path))
    assert text.endswith(", with mmproj-Big-8B-F16.gguf beside it (--mmproj none leaves it out)")
    assert held_bytes(config, facts(tmp_path)) == 100
    assert held_bytes(config, None) == 0
    same, another = (SideFile(name="eyes", size_bytes=size, digest="") for size in (100, 7))
    assert held_bytes(config, facts(tmp_path), same) == 100
    assert held_bytes(config, facts(tmp_path), another) == 107


def test_one_that_is_given_is_taken_instead(tmp_path: Path) -> None:
    put(tmp_path, "mmproj-Big-8B-F16.gguf", "another.gguf")
    can = modalities(NodeConfig(home=tmp_path, mmproj=tmp_path / "another.gguf"), facts(tmp_path))
    assert (can.projector, can.found) == (tmp_path / "another.gguf", False)


def test_one_that_is_not_wanted_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "mmproj-Big-8B-F16.gguf")
    config = NodeConfig(home=tmp_path, mmproj=Path("none"))
    assert modalities(config, facts(tmp_path)).projector is None
    assert held_bytes(config, facts(tmp_path)) == 0
    assert "beside" not in described(config, facts(tmp_path))
