"""Models, a cache to build in and a hub to download from, for tests that start processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_gguf
from tests.support.downloads import FILE, REPO, Person, some_bytes
from tests.support.engine_lab import EngineLab, engine_lab
from tests.support.hub import Hub, Stored


@pytest.fixture(scope="session")
def tiny_model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads in no time and answers nonsense."""
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")


@pytest.fixture(scope="session")
def slow_model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three gigabytes of zeros: seconds pass while `check_tensors=true` reads every one."""
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    return tiny_gguf.write_sparse(path, layers=4, hidden=4096, feed_forward=32768)


@pytest.fixture(scope="module")
def lab(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    """Engines without a start of their own, alone and over workers."""
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh could not be built")
    with engine_lab(libraries, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def cache(tmp_path: Path, engine_sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache but for the engine's sources, which are large and the same for all."""
    cache = tmp_path / "cache"
    (cache / "sources").mkdir(parents=True)
    (cache / "sources" / engine_sources.name).symlink_to(engine_sources)
    monkeypatch.setenv("MESH_LLM_CACHE", str(cache))
    return cache


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    """Has a models folder, a home, and a hub to download from."""
    return Person(hub=hub, folder=tmp_path)


@pytest.fixture
def stored(hub: Hub) -> Stored:
    """What the hub has by the name of `downloads.NAME`."""
    return hub.put(REPO, FILE, some_bytes(3_000_000))
