"""Files that go with the model: told apart by their digests, and looked for here first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.local.side_files import SideFiles
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import SideFile
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.types import HostingMode
from tests.support.planning import settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setenv("MESH_LLM_MODELS", str(models))
    return models


def side_files(tmp_path: Path, **options: Any) -> SideFiles:
    config = NodeConfig(home=tmp_path, **options)
    return SideFiles(config=config, digests=PieceHashes(tmp_path / "digests"), busy=lambda: False)


async def test_a_file_is_found_by_its_bytes_whatever_it_is_called(tmp_path: Path, folder: Path) -> None:
    given = tmp_path / "mmproj-F16.gguf"
    given.write_bytes(b"what lets it see")
    file = await side_files(tmp_path).described(given)
    assert (file.name, file.size_bytes) == ("mmproj-F16", 16)

    (folder / "mmproj-F16.gguf").write_bytes(b"another of 16 b.")
    here = side_files(tmp_path)
    await here.find([file], None)
    assert here.path(file) is None
    (folder / "eyes.gguf").write_bytes(given.read_bytes())
    await here.find([file], None)
    assert here.path(file) == folder / "eyes.gguf"
    assert [held.name for held in here.held(settings(projector=file))] == ["mmproj-F16"]

    (folder / "eyes.gguf").unlink()
    assert here.path(file) is None
    await here.find([file], tmp_path / "model.gguf")
    assert here.path(file) == given


@pytest.mark.parametrize(
    ("options", "hosts", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"hosting": HostingMode.NEVER}, True, False),
        ({"mmproj": Path("none")}, True, False),
    ],
)
def test_who_may_host_wants_the_projector(
    options: dict[str, Any], hosts: bool, wanted: bool, tmp_path: Path
) -> None:
    file = SideFile(name="eyes", size_bytes=5, digest="ab" * 32)
    found = side_files(tmp_path, **options).wanted(settings(projector=file), hosts=hosts)
    assert found == ((file,) if wanted else ())


def test_settings_carry_it() -> None:
    file = SideFile(name="eyes", size_bytes=5, digest="ab" * 32)
    made = settings(projector=file)
    assert settings_from_document(settings_to_document(made)) == made
    assert "projector" not in settings_to_document(settings())
