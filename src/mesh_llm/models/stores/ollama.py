"""Ollama's store: manifests/REGISTRY/NAMESPACE/NAME/TAG names blobs/sha256-…, by what each is for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_llm.models.stores.files import printable
from mesh_llm.models.stores.local import OLLAMA_PREFIX, LocalModel, Store, title
from mesh_llm.models.stores.reading import Reading, open_regular

OLLAMA_MANIFEST_BYTES = 1 << 20
"""Real ones have about one kilobyte."""
OLLAMA_LAYERS = 4096
"""Of one manifest: five in practice, some hundreds where each tensor is one."""


_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_OWN_REGISTRY, _OWN_NAMESPACE = "registry.ollama.ai", "library"
_DEPTH = 3
"""Folders below manifests/ that a tag lies in."""


class _Unusable(Exception):
    """Why a manifest gives no model."""


def in_store(reading: Reading, folder: Path) -> Iterator[LocalModel]:
    for name, digest in _named(reading, folder):
        blob = _blob(folder / "blobs", digest)
        if about := reading.gguf(blob):
            yield LocalModel(
                name=OLLAMA_PREFIX + name,
                path=blob,
                files=(blob,),
                size_bytes=about.st_size,
                store=reading.store,
            )


def blob_title(path: Path) -> str | None:
    """What Ollama calls the model of a blob; None of any other file."""
    match = _DIGEST.fullmatch(path.name)
    if match is None or path.parent.name != "blobs":
        return None
    named = _named(Reading(Store.OLLAMA), path.parent.parent)
    titles = [title(name) for name, digest in named if digest == match[1]]
    return min(titles, key=lambda each: (len(each), each), default=None)


def _named(reading: Reading, folder: Path) -> Iterator[tuple[str, str]]:
    """Names, with the digest of the weights of each."""
    manifests = folder / "manifests"
    for path in reading.files(manifests, depth=_DEPTH):
        parts = path.relative_to(manifests).parts
        if len(parts) != _DEPTH + 1:
            continue
        try:
            yield _name(*parts), _weights(_read(path))
        except _Unusable as why:
            reading.skip(path, str(why))


def _name(registry: str, namespace: str, name: str, tag: str) -> str:
    """As Ollama shows it: only what differs from its own library is said."""
    owner = [] if (registry, namespace) == (_OWN_REGISTRY, _OWN_NAMESPACE) else [namespace]
    host = [] if registry == _OWN_REGISTRY else [registry]
    return printable(f"{'/'.join([*host, *owner, name])}:{tag}")


def _read(path: Path) -> Any:
    try:
        descriptor = open_regular(path)
        try:
            text = os.read(descriptor, OLLAMA_MANIFEST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _Unusable(f"cannot be read: {error.strerror}") from None
    if len(text) > OLLAMA_MANIFEST_BYTES:
        raise _Unusable(f"is a manifest of more than {OLLAMA_MANIFEST_BYTES:,} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Unusable("is a manifest that is not JSON") from None


def _weights(manifest: Any) -> str:
    """The digest of the one layer that is the model."""
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or len(layers) > OLLAMA_LAYERS:
        raise _Unusable("is a manifest without a list of layers")
    kinds = [layer.get("mediaType") for layer in layers if isinstance(layer, dict)]
    if f"{_KIND}adapter" in kinds:
        raise _Unusable("is a base model with an adapter, which only Ollama puts together")
    models = [
        layer for layer in layers if isinstance(layer, dict) and layer.get("mediaType") == f"{_KIND}model"
    ]
    if not models:
        raise _Unusable("has no weights in GGUF")
    if len(models) > 1:
        raise _Unusable(f"has its weights in {len(models)} files, which only Ollama puts together")
    digest = models[0].get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise _Unusable("names its weights by something that is not a sha256 digest")
    return match[1]


def _blob(folder: Path, digest: str) -> Path:
    """Earlier versions wrote a colon."""
    path, earlier = folder / f"sha256-{digest}", folder / f"sha256:{digest}"
    return earlier if not os.path.lexists(path) and os.path.lexists(earlier) else path
