"""A clone of an earlier commit, to be run beside this one."""

from __future__ import annotations

import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "7d86fa5"
"""Speaks the protocol of today. To be replaced when that changes; later by the last release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    version: str
    env: dict[str, str]
    """Of a node whose code is that of the commit."""


def earlier(folder: Path) -> Earlier:
    """Unpacked in `folder`; the packages that it needs are those of this environment."""
    archive = folder / "sources.tar"
    folder.mkdir()
    git = ["git", "-C", str(ROOT), "archive", "--output", str(archive), COMMIT, "src", "native"]
    if subprocess.run(git, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"this clone has no commit {COMMIT}: git fetch --unshallow")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    init = (folder / "src" / "mesh_llm" / "__init__.py").read_text("utf-8")
    found = re.search(r'__version__ = "([^"]+)"', init)
    assert found is not None
    return Earlier(version=found[1], env={"PYTHONPATH": str(folder / "src")})
