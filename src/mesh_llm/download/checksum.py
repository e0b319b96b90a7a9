"""The hash that lies beside each downloaded file."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from mesh_llm.errors import DownloadFailed, ModelError


def checksum_file(path: Path) -> Path:
    """Beside each download, in the form that `sha256sum -c` reads."""
    return path.with_name(f"{path.name}.sha256")


def recorded(path: Path) -> str | None:
    """The hash that the file came with; None where none is noted."""
    try:
        words = checksum_file(path).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return None
    return words[0] if words else None


def computed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def another_file(path: Path, source: object) -> DownloadFailed:
    """What a name belongs to is somebody's own file."""
    return DownloadFailed(
        f"{path} exists already and is another file than {source}",
        hint="remove it or give it another name, and run this again",
    )


def record(path: Path, sha256: str) -> None:
    note = checksum_file(path)
    scratch = note.with_name(f".{note.name}.new")
    scratch.write_text(f"{sha256}  {path.name}\n", "utf-8")
    scratch.replace(note)


def verify(path: Path, known: str | None = None) -> str:
    """Compare every byte of a downloaded file with the hash it came with, else with `known`; returns that.

    The fingerprint that nodes exchange samples the file; this reads all of it.
    """
    expected = recorded(path) or known
    try:
        with path.open("rb") as file:
            if expected is None:
                raise ModelError(
                    f"{path} came without a hash to compare it with",
                    hint=f"sha256sum {shlex.quote(str(path))} shows its own; its page on the hub has one",
                )
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ModelError(
            f"there is no {path}", hint="mesh-llm download NAME fetches the model and its hash"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be checked: {error.strerror}") from error
    if found != expected:
        raise ModelError(
            f"{path} is damaged: its sha256 is {found[:12]}…, it should be {expected[:12]}…",
            hint=f"rm {shlex.quote(str(path))}, and download it again",
        )
    return found
