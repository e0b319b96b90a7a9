"""Programs from npm, as a lock file names them: installed once per machine, beside the engine's libraries."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

from mesh_llm.home import cache_folder

_WITHIN_S = 600.0


def folder_of(locked: Path) -> Path:
    """Where the packages of `locked` (a folder with package.json and package-lock.json) are, or will be."""
    named = hashlib.sha256((locked / "package-lock.json").read_bytes()).hexdigest()[:12]
    return cache_folder() / "npm" / f"{locked.name}-{named}"


def install(locked: Path) -> str | None:
    """Install them where they are not yet; None when they are there, else why not."""
    folder = folder_of(locked)
    if (folder / "installed").exists():
        return None
    if shutil.which("npm") is None:
        return "npm is missing"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Another run of the tests may be about the same.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "installed").exists():
            return None
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(locked / name, folder / name)
        # No package may run anything while it is installed.
        argv = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, check=False, timeout=_WITHIN_S
        )
        if done.returncode != 0:
            return f"npm ci fails: {done.stderr.strip()[-500:]}"
        (folder / "installed").touch()
    return None
