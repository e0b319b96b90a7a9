"""Nodes that compute as one with another processor would: what a bench and tests of recovery rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.engine.build import library
from tests.support import processors


@pytest.fixture(autouse=True)
def compiled(libraries: dict[str, Path]) -> None:
    if set(libraries) < {"mesh", "cpu"} or not library("cpu").built:
        pytest.skip("the native libraries could not be built")


def test_without_a_library_it_is_the_engines_own_code() -> None:
    other = processors.without_library()
    assert other.library is None
    found = processors.features(other)
    assert found
    assert found != processors.features(None)


@pytest.mark.full
@pytest.mark.timeout(2 * processors.BUILD_S)
def test_a_library_for_avx2_uses_nothing_newer() -> None:
    if not processors.can_build_avx2():
        pytest.skip("this machine cannot make code for AVX2 that is another than its own")
    other = processors.with_avx2()
    assert other.library is not None
    assert other.library != library("cpu").path.resolve()
    found = processors.features(other)
    assert "AVX2" in found
    assert not [name for name in found if name.startswith(("AVX512", "AMX"))]
    assert "AVX512" in processors.features(None)
