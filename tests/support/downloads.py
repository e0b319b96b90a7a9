"""Somebody who downloads models from a hub on loopback."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

from tests.support.command import Ended, mesh_llm
from tests.support.hub import Hub

REPO = "maker/Model-3B-GGUF"
FILE = "model-3b-q4_k_m.gguf"
NAME = f"hf:{REPO}:{FILE}"
TOKEN = "hf_never_to_be_seen"
PAIR = """
[target]
repo = "maker/Model-3B-GGUF"
files = ["model-3b-q4_k_m.gguf"]
size_bytes = 3000000
draft = "small"

[small]
repo = "maker/small"
files = ["small.gguf"]
"""
"""A catalog of one's own."""


def some_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(kw_only=True)
class Person:
    """Somebody with a models folder, a home and a hub."""

    hub: Hub
    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def env(self) -> dict[str, str]:
        return {
            **self.hub.env,
            "HF_HOME": str(self.folder / "hf"),
            "MESH_LLM_MODELS": str(self.models),
            "MESH_LLM_HOME": str(self.folder / "home"),
        }

    def downloads(self, *arguments: str, within_s: float = 60.0, **env: str) -> Ended:
        ended = mesh_llm("download", *arguments, env={**self.env, **env}, within_s=within_s)
        assert "Traceback" not in ended.stderr
        assert TOKEN not in ended.stdout + ended.stderr
        assert "secret-signature" not in ended.stdout + ended.stderr
        return ended

    def catalog(self, text: str) -> None:
        (self.folder / "home").mkdir(exist_ok=True)
        (self.folder / "home" / "catalog.toml").write_text(text)

    def left(self) -> list[str]:
        """What lies in the models folder, parts included."""
        return sorted(path.name for path in self.models.iterdir()) if self.models.exists() else []

    @property
    def part(self) -> Path | None:
        return next(self.models.glob(f".incoming-fetch-*/{FILE}.part"), None)

    def part_bytes(self) -> int:
        part = self.part
        return part.stat().st_size if part is not None else 0


def assert_is_here(person: Person, data: bytes, file: str = FILE) -> None:
    path = person.models / file
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    digest = hashlib.sha256(data).hexdigest()
    assert path.with_name(f"{file}.sha256").read_text() == f"{digest}  {file}\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
