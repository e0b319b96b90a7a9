"""Models for tests that start engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads in no time and answers nonsense."""
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")


@pytest.fixture(scope="session")
def slow_model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three gigabytes of zeros: seconds pass while `check_tensors=true` reads every one."""
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    return tiny_gguf.write_sparse(path, layers=4, hidden=4096, feed_forward=32768)
