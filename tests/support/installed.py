"""Clients that cannot live in our own environment: installed once per machine, as a lock file names them."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from mesh_llm.home import cache_folder

_WITHIN_S = 600.0


class Client(ABC):
    """What `locked`, a folder beside the tests, names; it lies beside the engine's libraries."""

    kind: str
    needs: str
    """The program that installs it."""
    lock_file: str

    def __init__(self, locked: Path) -> None:
        self.locked = locked
        named = hashlib.sha256((locked / self.lock_file).read_bytes()).hexdigest()[:12]
        self.folder = cache_folder() / self.kind / f"{locked.name}-{named}"
        self._stamp = self.folder / "installed"

    def can_be_installed(self) -> bool:
        return self._stamp.exists() or shutil.which(self.needs) is not None

    def install(self) -> str | None:
        """Where it is not yet; None when it is there, else why not."""
        if self._stamp.exists():
            return None
        if not self.can_be_installed():
            return f"{self.needs} is missing"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            # Another run of the tests may be about the same.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._stamp.exists():
                return None
            for argv in self.steps():
                done = subprocess.run(
                    argv, cwd=self.folder, capture_output=True, text=True, check=False, timeout=_WITHIN_S
                )
                if done.returncode != 0:
                    return f"{' '.join(argv[:4])} fails: {done.stderr.strip()[-500:]}"
            self._stamp.touch()
        return None

    @abstractmethod
    def steps(self) -> list[list[str]]:
        """The commands that install it, run in its folder."""


class FromNpm(Client):
    kind = "npm"
    needs = "npm"
    lock_file = "package-lock.json"

    def steps(self) -> list[list[str]]:
        for name in ("package.json", self.lock_file):
            shutil.copyfile(self.locked / name, self.folder / name)
        # No package may run anything while it is installed.
        return [["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]]

    def command(self, name: str) -> Path:
        return self.folder / "node_modules" / ".bin" / name


class FromPyPI(Client):
    kind = "pypi"
    needs = sys.executable
    lock_file = "requirements.lock"

    def steps(self) -> list[list[str]]:
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        wanted = ["--require-hashes", "--only-binary", ":all:", "-r", str(self.locked / self.lock_file)]
        return [
            [sys.executable, "-m", "venv", "--clear", "environment"],
            [str(self.python), "-m", "pip", "install", *quiet, *wanted],
        ]

    @property
    def python(self) -> Path:
        return self.folder / "environment" / "bin" / "python"
