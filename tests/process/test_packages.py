"""Packages of a package index: no code of theirs runs on this machine before its hash is checked."""

from __future__ import annotations

import asyncio
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest

from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION
from mesh_llm.engine import sources
from mesh_llm.engine.packages import pip_download
from mesh_llm.engine.sources import ENGINE_SDIST_ROOT, engine_sources
from mesh_llm.errors import DownloadFailed, MeshError

STEM = f"{ENGINE_PACKAGE}-{ENGINE_VERSION}"


class Index:
    """A package index in a folder, with an sdist whose code leaves a mark wherever it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = folder / "it-ran"

    def hold(self, build_system: str) -> str:
        """Put the engine's sdist there; its hash."""
        leave = f"open({str(self.mark)!r}, 'w').close()\n"
        files = {
            f"{STEM}/PKG-INFO": f"Metadata-Version: 2.1\nName: {ENGINE_PACKAGE}\nVersion: {ENGINE_VERSION}\n",
            f"{STEM}/pyproject.toml": f"[build-system]\n{build_system}\n",
            f"{STEM}/setup.py": leave,
            f"{STEM}/own_backend.py": leave,
            f"{ENGINE_SDIST_ROOT}ggml/CMakeLists.txt": "",
        }
        page = self.folder / "simple" / ENGINE_PACKAGE
        page.mkdir(parents=True)
        archive = page / f"{STEM}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
        (page / "index.html").write_text(f'<a href="{archive.name}">{archive.name}</a>')
        return hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    return Index(tmp_path)


def fetch() -> Path:
    return asyncio.run(engine_sources(lambda progress: None))


OWN_BACKEND = 'requires = []\nbuild-backend = "own_backend"\nbackend-path = ["."]'
ENGINES_BACKEND = 'requires = ["builder"]\nbuild-backend = "setuptools.build_meta"'


@pytest.mark.parametrize("build_system", [OWN_BACKEND, ENGINES_BACKEND])
def test_an_altered_sdist_never_runs(index: Index, build_system: str) -> None:
    index.hold(build_system)

    with pytest.raises(DownloadFailed) as refused:
        fetch()

    assert not index.mark.exists()
    assert refused.value.message == (
        f"what the package index has as {ENGINE_PACKAGE}=={ENGINE_VERSION} "
        "is not the file that this version was made for"
    )
    assert not sources.sources_tree().exists()


def test_the_right_sdist_is_unpacked_and_not_built(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build requirements have no hash: whatever the index has under their names would run, too."""
    monkeypatch.setattr(sources, "ENGINE_SDIST_SHA256", index.hold(ENGINES_BACKEND))

    tree = fetch()

    assert (tree / "ggml" / "CMakeLists.txt").is_file()
    assert not index.mark.exists()


def test_an_sdist_that_is_not_there(index: Index) -> None:
    (index.folder / "simple" / ENGINE_PACKAGE).mkdir(parents=True)

    with pytest.raises(MeshError, match="the package index cannot be reached"):
        fetch()


OLD_PIP = """
import pathlib, sys
arguments = sys.argv[1:]
if "raw" in arguments:
    print("\\nUsage:   \\n  pip download [options] <requirement specifier> ...\\n", file=sys.stderr)
    print("option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')", file=sys.stderr)
    sys.exit(2)
if {lacks_more}:
    print("\\nUsage:   \\n  pip download [options] <requirement specifier> ...\\n", file=sys.stderr)
    print("no such option: --no-build-isolation", file=sys.stderr)
    sys.exit(2)
pathlib.Path(arguments[arguments.index("--dest") + 1], "model-1-py3-none-any.whl").touch()
"""


@pytest.mark.parametrize("lacks_more", [False, True])
def test_an_old_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks_more: bool) -> None:
    """Before 24.1 it could not tell programs how far it is."""
    pip = tmp_path / "old" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(OLD_PIP.format(lacks_more=lacks_more))
    monkeypatch.setenv("PYTHONPATH", str(pip.parent))
    folder = tmp_path / "arrived"
    folder.mkdir()
    download = pip_download("model==1", folder, what="model", progress=lambda _: None)

    if not lacks_more:
        assert asyncio.run(download) == folder / "model-1-py3-none-any.whl"
        return
    with pytest.raises(DownloadFailed) as caught:
        asyncio.run(download)
    assert caught.value.message == "the pip of this Python is too old to download model==1"
    assert caught.value.hint == f"{sys.executable} -m pip install --upgrade pip"
