"""Model stores as other programs lay them out, below a temporary home."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from mesh_llm.models.stores import Places

STUB = b"GGUF and no more of it"
"""Enough for those who look at no header."""
KIND = "application/vnd.ollama.image."


class Home:
    """One person's stores; nothing of the real ones is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = path / ".models"
        self.hub = path / ".cache" / "huggingface" / "hub"
        self.lmstudio = path / ".lmstudio" / "models"
        self.ollama = path / ".ollama" / "models"

    @property
    def places(self) -> Places:
        earlier = self.path / ".cache" / "lm-studio" / "models"
        return Places(
            models=self.models, hub=self.hub, lmstudio=(self.lmstudio, earlier), ollama=(self.ollama,)
        )

    @property
    def env(self) -> dict[str, str]:
        """For a command that is to look here and nowhere else."""
        empty = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
        return {
            "HOME": str(self.path),
            "MESH_LLM_HOME": str(self.path / ".mesh-llm"),
            "MESH_LLM_CACHE": str(self.path / "cache"),
            "MESH_LLM_MODELS": str(self.models),
            "OLLAMA_MODELS": str(self.ollama),
            **dict.fromkeys(empty, ""),
        }

    def add(self, name: str, content: bytes = STUB) -> Path:
        return put(self.models / name, content)

    def add_hub(
        self, repo: str, file: str, content: bytes = STUB, *, revision: str = "a" * 40, main: bool = False
    ) -> Path:
        """As huggingface_hub does: a blob, and a link to it in a snapshot."""
        folder = self.hub / f"models--{repo.replace('/', '--')}"
        blob = put(folder / "blobs" / hashlib.sha256(content).hexdigest(), content)
        link = folder / "snapshots" / revision / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        if main:
            put(folder / "refs" / "main", revision.encode())
        return link

    def add_lmstudio(self, repo: str, file: str, content: bytes = STUB) -> Path:
        return put(self.lmstudio / repo / file, content)

    def add_ollama(
        self, name: str, content: bytes = STUB, *, registry: str = "registry.ollama.ai", **more: Any
    ) -> Path:
        """`name` is NAMESPACE/NAME/TAG. Further layers: kind=content."""
        blob = self.blob(content)
        layers = [layer("model", blob), *(layer(kind, self.blob(data)) for kind, data in more.items())]
        self.manifest(f"{registry}/{name}", {"schemaVersion": 2, "layers": layers})
        return blob

    def blob(self, content: bytes) -> Path:
        return put(self.ollama / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}", content)

    def manifest(self, name: str, document: object) -> Path:
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        return put(self.ollama / "manifests" / name, text)


def layer(kind: str, blob: Path) -> dict[str, Any]:
    digest = blob.name.replace("-", ":", 1)
    return {"mediaType": KIND + kind, "digest": digest, "size": blob.stat().st_size}


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
