"""mesh-llm as others get it: a wheel of this clone, in an environment of its own without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mesh_llm.bundle.own_wheel import best_variant

ROOT = Path(__file__).parents[2]
_PROBE = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"


def make_wheel(folder: Path) -> Path:
    """With one CPU library, the best that this processor can run: all of them take half an hour."""
    argv = [sys.executable, "-m", "tools.wheel", "--only", best_variant()]
    argv += ["--build", str(folder / "build"), "--dist", str(folder / "dist")]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


def interpreter(version: str) -> Path | None:
    """A Python of that version on this machine: on the PATH, or one that pyenv keeps."""
    for path in _candidates(version):
        try:
            tried = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
        except OSError:
            continue
        # pyenv puts commands on the PATH that only say where the real ones are.
        if tried.stdout.strip() == version:
            return path
    return None


def _candidates(version: str) -> Iterator[Path]:
    name = f"python{version}"
    on_path = (Path(folder) / name for folder in os.get_exec_path())
    return chain(on_path, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/{name}"))


class Installed:
    """A wheel in an environment of its own, in which no compiler can be found."""

    def __init__(self, folder: Path, *, python: Path = Path(sys.executable)) -> None:
        self.folder = folder
        self.bin = folder / "environment" / "bin"
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "MESH_LLM_NO_RELAY": "1",
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        }
        subprocess.run([python, "-m", "venv", folder / "environment"], check=True)

    def install(self, wanted: str) -> None:
        argv = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--no-input", wanted]
        subprocess.run(argv, check=True, env=self.env)

    def run(self, *arguments: str, within_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "mesh-llm"), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
