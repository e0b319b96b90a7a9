"""llama.cpp's web page, taken out of the installed engine."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine import page, prebuilt


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path))
    return tmp_path / "page"


async def test_every_file_that_the_page_names_is_there(cache: Path) -> None:
    files = await page.page_files()

    index = gzip.decompress(files["index.html"]).decode()
    named = set(re.findall(r'href="(?:\./)?([^"]+)"', index))
    assert len(named) > 10
    assert named <= set(files)
    assert index.count("<script>") == 1
    (kept,) = cache.iterdir()
    assert kept.name.startswith(f"{ENGINE_VERSION}-")
    assert await page.page_files() == files


async def test_a_damaged_copy_is_replaced(cache: Path) -> None:
    files = await page.page_files()
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-4096])

    assert await page.page_files() == files


async def test_a_package_s_own_copy_needs_no_engine(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await page.take_out(tmp_path / "package" / page.PACKAGED)
    monkeypatch.setattr(prebuilt, "folder", lambda: tmp_path / "package")
    monkeypatch.setattr(page, "find_wheel", lambda: pytest.fail("the engine is looked for"))

    assert "index.html" in await page.page_files()
    assert not cache.exists()
