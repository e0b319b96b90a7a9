"""Whether files are still those that were read: by size, time of the last change and inode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def stamp(path: Path) -> str:
    """Another text for another file, or other bytes in it; empty where there is none."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ino}"


def stamps(paths: Iterable[Path]) -> dict[str, str]:
    return {str(path): stamp(path) for path in paths}


def changed(known: Mapping[str, str]) -> str | None:
    """What has become of the first file that is no longer as it was; None where all are."""
    for path, before in known.items():
        if (now := stamp(Path(path))) != before:
            if not now:
                return f"{path} was removed while this node ran"
            return f"{path} was {'changed' if _is_same_file(before, now) else 'replaced'} while this node ran"
    return None


def is_rewritten(known: Mapping[str, str]) -> bool:
    """Whether one of the files has other bytes in its place: then so has whoever mapped it."""
    now = stamps(map(Path, known))
    return any(now[path] != before and _is_same_file(before, now[path]) for path, before in known.items())


def _is_same_file(before: str, now: str) -> bool:
    return bool(before and now) and before.split()[-1] == now.split()[-1]
