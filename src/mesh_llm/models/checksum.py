"""The hash that lies beside each downloaded file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mesh_llm.errors import ModelError


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


def record(path: Path, sha256: str) -> None:
    note = checksum_file(path)
    scratch = note.with_name(f".{note.name}.new")
    scratch.write_text(f"{sha256}  {path.name}\n", "utf-8")
    scratch.replace(note)


def verify(path: Path) -> str:
    """Compare every byte of a downloaded file with the hash it came with; returns that hash.

    The fingerprint that nodes exchange samples the file; this reads all of it.
    """
    try:
        noted = checksum_file(path).read_text().split()[0]
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ModelError(
            f"there is no {error.filename}", hint="mesh-llm download NAME fetches the model and its hash"
        ) from None
    except (OSError, IndexError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its .sha256 holds no hash"
        raise ModelError(f"{path} cannot be checked: {why}") from error
    if found != noted:
        raise ModelError(
            f"{path} is damaged: its sha256 is {found[:12]}…, downloaded was {noted[:12]}…",
            hint=f"rm {path}, and download it again",
        )
    return found
