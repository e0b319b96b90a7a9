"""Fetch packages by name with pip, so that a person's own index, proxy and cache settings count."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh_llm.engine.process import run
from mesh_llm.errors import DownloadFailed
from mesh_llm.types import Progress, ProgressSink

PACKAGE_TIMEOUT_S = 30 * 60.0
"""100 MB over a very slow line."""


_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")
_OFFLINE = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Network is unreachable|ConnectTimeout|"
    r"Failed to establish a new connection|Connection refused|No matching distribution found|"
    r"IncompleteRead|Connection broken|Connection aborted|ReadTimeoutError",
)
_BACKEND = """\
import pathlib

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "{name}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return info.name
"""


async def pip_download(requirement: str, folder: Path, *, what: str, progress: ProgressSink) -> Path:
    """Download one package as a wheel and return it. No code in it runs; the caller checks what is in it."""
    name = requirement.split("==")[0]
    return await _pip(requirement, ("--only-binary", name, requirement), folder, what=what, progress=progress)


async def pip_download_source(
    requirement: str, folder: Path, *, sha256: str, what: str, progress: ProgressSink
) -> Path:
    """Download the sources of one package (`name==version`) and return the archive.

    pip asks every sdist for its metadata, and for that it runs the sdist's code and that of its
    build requirements, which it takes from the index without any hash. Neither may happen:
    - with --require-hashes pip checks the archive before it unpacks it, so an altered one never runs;
    - with --no-build-isolation pip fetches no build requirements, and the build backend that it
      finds is our own, which names the package and does nothing else. So the right one does not run either.
    Reading the index ourselves would do without the backend, but also without a person's own index,
    proxy, certificates and passwords: those are pip's to know.
    """
    name = requirement.split("==")[0]
    with tempfile.TemporaryDirectory(prefix="mesh-llm-pip-") as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        ours = _backend(requirement, Path(scratch) / "backend")
        inherited = os.environ.get("PYTHONPATH")
        return await _pip(
            requirement,
            ("--no-binary", name, "--no-build-isolation", "--require-hashes", "--requirement", str(pinned)),
            folder,
            env={"PYTHONPATH": os.pathsep.join([str(ours), *([inherited] if inherited else [])])},
            what=what,
            progress=progress,
        )


async def pip_download_locked(
    requirements: Path, folder: Path, *, python: str, platforms: Sequence[str]
) -> None:
    """Download wheels of all `requirements`, which name hashes, for another Python and for `platforms`."""
    target = ["--implementation", "cp", "--python-version", python]
    target += [option for tag in platforms for option in ("--platform", tag)]
    wanted = ("--only-binary", ":all:", "--require-hashes", *target, "--requirement", str(requirements))
    packages = f"the packages for Python {python}"
    await _run_pip(packages, (*wanted, "--dest", str(folder)))


async def pip_install_locked(
    requirements: Path, folder: Path, *, what: str, progress: ProgressSink, timeout_s: float
) -> None:
    """Unpack wheels of all `requirements`, which name hashes, into a folder: into no environment.

    Everything is written beside that folder: /tmp may be a part of memory, and these are large. pip keeps no
    second copy of them.
    """
    wanted = ("--only-binary", ":all:", "--require-hashes", "--no-cache-dir", "--no-user", "--no-compile")
    await _run_pip(
        what,
        (*wanted, "--requirement", str(requirements), "--target", str(folder)),
        verb="install",
        env={"TMPDIR": str(folder.parent)},
        what=what,
        progress=progress,
        timeout_s=timeout_s,
    )


def _backend(requirement: str, folder: Path) -> Path:
    """A build backend (PEP 517) in the place of the one that the engine's sdist names."""
    name, _, version = requirement.partition("==")
    package = folder / "setuptools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "build_meta.py").write_text(_BACKEND.format(name=name, version=version))
    return folder


async def _pip(
    requirement: str,
    wanted: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    what: str,
    progress: ProgressSink,
) -> Path:
    before = set(folder.iterdir())
    await _run_pip(requirement, (*wanted, "--dest", str(folder)), env=env, what=what, progress=progress)
    arrived = [path for path in folder.iterdir() if path not in before]
    if not arrived:
        raise _failure(requirement, "")
    return arrived[0]


async def _run_pip(
    requirement: str,
    wanted: Sequence[str],
    *,
    verb: str = "download",
    env: Mapping[str, str] | None = None,
    what: str = "",
    progress: ProgressSink = lambda _: None,
    timeout_s: float = PACKAGE_TIMEOUT_S,
) -> None:
    lines: deque[str] = deque(maxlen=40)

    def on_line(line: str) -> None:
        if match := _PROGRESS.match(line.strip()):
            progress(Progress(what=what, done=int(match[1]), total=int(match[2]), unit="bytes"))
        elif line.strip():
            lines.append(line.strip())

    for bar in ("raw", "off"):
        lines.clear()
        finished = await run(
            [
                *(sys.executable, "-m", "pip", verb, "--no-deps", "--progress-bar", bar),
                *("--disable-pip-version-check", "--no-input", "--retries", "2"),
                *wanted,
            ],
            timeout_s=timeout_s,
            env=env,
            on_line=on_line,
        )
        if finished.status == 0:
            return
        # Before 24.1, pip tells no program how far it is.
        if not any("invalid choice: 'raw'" in line for line in lines):
            break
    raise _failure(requirement, "\n".join(lines))


def _failure(requirement: str, said: str) -> DownloadFailed:
    if "No space left on device" in said:
        return DownloadFailed(
            f"the disk filled up while downloading {requirement}", hint="free some space and run it again"
        )
    if "DO NOT MATCH THE HASHES" in said:
        return DownloadFailed(
            f"what the package index has as {requirement} is not the file that this version was made for",
            hint="the package index, or a proxy before it, serves an altered file; do not use it",
        )
    if "No module named pip" in said:
        return DownloadFailed(
            f"pip is needed to download {requirement}, and it is not installed",
            hint=f"{sys.executable} -m ensurepip",
        )
    if said.startswith("Usage:"):
        return DownloadFailed(
            f"the pip of this Python is too old to download {requirement}",
            hint=f"{sys.executable} -m pip install --upgrade pip",
        )
    if _OFFLINE.search(said):
        return DownloadFailed(
            f"cannot download {requirement}: the package index cannot be reached",
            hint="connect to the internet once, or set pip's index (pip config set global.index-url …)",
        )
    last = next((line for line in reversed(said.splitlines()) if line.startswith("ERROR")), said[-300:])
    return DownloadFailed(f"pip could not download {requirement}: {last}")
