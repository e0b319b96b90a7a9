"""Fetch packages by name with pip, so that a person's own index, proxy and cache settings count."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path

from mesh_llm.defaults import PACKAGE_TIMEOUT_S
from mesh_llm.engine.process import run
from mesh_llm.errors import DownloadFailed
from mesh_llm.types import Progress, ProgressSink

_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")
_OFFLINE = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Network is unreachable|ConnectTimeout|"
    r"Failed to establish a new connection|Connection refused|No matching distribution found",
)


async def pip_download(
    requirement: str, folder: Path, *, source: bool, what: str, progress: ProgressSink
) -> Path:
    """Download one package, as a wheel or as its sources, and return the file."""
    name = requirement.split("==")[0]
    lines: deque[str] = deque(maxlen=40)

    def on_line(line: str) -> None:
        if match := _PROGRESS.match(line.strip()):
            progress(Progress(what=what, done=int(match[1]), total=int(match[2]), unit="bytes"))
        elif line.strip():
            lines.append(line.strip())

    before = set(folder.iterdir())
    finished = await run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "raw"),
            *("--no-binary" if source else "--only-binary", name),
            *("--disable-pip-version-check", "--no-input", "--retries", "2"),
            *("--dest", str(folder), requirement),
        ],
        timeout_s=PACKAGE_TIMEOUT_S,
        on_line=on_line,
    )
    arrived = [path for path in folder.iterdir() if path not in before]
    if finished.status == 0 and arrived:
        return arrived[0]
    raise _failure(requirement, "\n".join(lines))


def _failure(requirement: str, said: str) -> DownloadFailed:
    if "No space left on device" in said:
        return DownloadFailed(
            f"the disk filled up while downloading {requirement}", hint="free some space and run it again"
        )
    if "No module named pip" in said:
        return DownloadFailed(
            f"pip is needed to download {requirement}, and it is not installed",
            hint=f"{sys.executable} -m ensurepip",
        )
    if _OFFLINE.search(said):
        return DownloadFailed(
            f"cannot download {requirement}: the package index cannot be reached",
            hint="connect to the internet once, or set pip's index (pip config set global.index-url …)",
        )
    last = next((line for line in reversed(said.splitlines()) if line.startswith("ERROR")), said[-300:])
    return DownloadFailed(f"pip could not download {requirement}: {last}")
