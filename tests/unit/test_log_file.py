"""The engine's log: a moment late, in order, bounded, and no reason for anything to fail."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path

import pytest

from mesh_llm.engine.log_file import LogFile

MODULE = "mesh_llm.engine.log_file"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


async def test_lines_are_written_together_a_moment_later(path: Path) -> None:
    with closing(LogFile(path)) as file:
        file.write("one")
        file.write("two")
        assert path.read_text() == ""

        async with asyncio.timeout(20):
            while not path.read_text():
                await asyncio.sleep(0.01)
        assert path.read_text() == "one\ntwo\n"

        file.write("three")
        async with asyncio.timeout(20):
            while path.read_text() != "one\ntwo\nthree\n":
                await asyncio.sleep(0.01)


async def test_only_its_owner_can_read_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what an earlier version left, and what comes after a rotation."""
    monkeypatch.setattr(f"{MODULE}.ENGINE_LOG_BYTES", 10)
    path.write_text("of an earlier version\n")
    path.chmod(0o644)
    with closing(LogFile(path)) as file:
        file.write("one")
        file.flush()
        file.write("two")

    modes = [each.stat().st_mode & 0o777 for each in path.parent.iterdir()]
    assert modes == [0o600] * len(modes)
    assert len(modes) > 1


async def test_the_end_loses_nothing(path: Path) -> None:
    with closing(LogFile(path)) as file:
        file.write("last words")

    assert path.read_text() == "last words\n"


async def test_a_flood_is_not_held_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.ENGINE_LOG_HELD_BYTES", 100)
    monkeypatch.setattr(f"{MODULE}.ENGINE_LOG_LATE_S", 1000)
    with closing(LogFile(path)) as file:
        for _ in range(11):
            file.write("0123456789")

        assert path.read_text() == "0123456789\n" * 11


async def test_old_lines_make_room_for_new_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.ENGINE_LOG_BYTES", 1000)
    monkeypatch.setattr(f"{MODULE}.ENGINE_LOG_HELD_BYTES", 100)
    with closing(LogFile(path)) as file:
        for number in range(1000):
            file.write(f"line {number}")

    sizes = {each.name: each.stat().st_size for each in path.parent.iterdir()}
    assert set(sizes) == {"engine.log", "engine.log.1", "engine.log.2"}
    assert max(sizes.values()) <= 1000
    assert path.read_text().endswith("line 999\n")


async def test_a_full_disk_is_told_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.ERROR), closing(LogFile(path)) as file:
        for _ in range(3):
            file.write("x" * (1 << 17))

    assert [record.getMessage() for record in caplog.records] == [
        f"the engine's log cannot be written path={path}"
    ]
