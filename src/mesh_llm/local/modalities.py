"""What a model does beside text: as its files tell, and as its node was asked."""

from __future__ import annotations

import re
from pathlib import Path

from mesh_llm.config import NodeConfig
from mesh_llm.frozen import frozen
from mesh_llm.local.model_files import file_stem
from mesh_llm.mesh_settings import SideFile
from mesh_llm.types import ModelFacts

_MARK = "mmproj"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_WEIGHTS = re.compile(r"(?:ud|model|i?q\d\w*|tq\d\w*|b?f16|f32|fp16|mxfp4\w*|imat|i1)")


@frozen
class Modalities:
    embeddings: bool
    rerank: bool
    projector: Path | None
    """The file that turns images or sound into what the model reads."""
    found: bool = False
    """Whether the projector lay beside the model, and nobody asked for it."""

    @property
    def projector_bytes(self) -> int:
        return self.projector.stat().st_size if self.projector is not None else 0


def modalities(config: NodeConfig, facts: ModelFacts, fetched: Path | None = None) -> Modalities:
    """`fetched`: the mesh's own projector, where it is here."""
    rerank = config.rerank or (facts.ranks and not config.embeddings)
    embeddings = not rerank and (config.embeddings or facts.encodes)
    if config.mmproj is not None:
        given = None if config.without_mmproj else config.mmproj.resolve()
        return Modalities(embeddings=embeddings, rerank=rerank, projector=given)
    beside = projector_beside(facts.files[0])
    projector = beside if beside is not None else fetched
    return Modalities(embeddings=embeddings, rerank=rerank, projector=projector, found=beside is not None)


def described(config: NodeConfig, facts: ModelFacts) -> str:
    """A model in a line, for the person who started the node."""
    can = modalities(config, facts)
    parts = [
        f"Model {file_stem(facts)}: {facts.quantisation}, {_size(facts.size_bytes)}, "
        f"{len(facts.layers)} layers, context {facts.context_trained}"
    ]
    if can.rerank:
        parts.append("reranks")
    elif can.embeddings:
        parts.append("makes embeddings")
    if can.found and can.projector is not None:
        parts.append(f"with {can.projector.name} beside it (--mmproj none leaves it out)")
    return ", ".join(parts)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def held_bytes(config: NodeConfig, facts: ModelFacts | None, projector: SideFile | None = None) -> int:
    """Memory that projectors take beside what plans count, as far as the sizes of files tell.

    `projector`: the mesh's, where this node may host with it.
    """
    own = modalities(config, facts).projector_bytes if facts is not None else 0
    meshs = projector.size_bytes if projector is not None else 0
    # A projector here is most likely the mesh's.
    return meshs if own == meshs else own + meshs


def projector_beside(model: Path) -> Path | None:
    """The projector of `model` in its folder.

    One of the same name; or one without any, where all files there are one model's.

    Names are all there is: `mmproj-NAME-F16.gguf`, `NAME-mmproj-f16.gguf`, and
    `mmproj-F16.gguf` in a folder of its own.
    """
    name = _essence(model)
    files = [file for file in sorted(model.parent.glob("*.gguf")) if file.is_file()]
    projectors = [file for file in files if _MARK in file.name.lower()]
    same = [file for file in projectors if _essence(file) == name]
    if not same and all(_essence(file) in (name, "") for file in files):
        same = [file for file in projectors if not _essence(file)]
    return same[0] if same and model not in projectors else None


def _essence(file: Path) -> str:
    """A file's name without what says how its weights are stored, or that it is a projector."""
    stem = _SHARD.sub("", file.stem.lower()).replace(_MARK, "-")
    words = [word for word in re.split(r"[-.]+", stem) if word]
    return "-".join(word for word in words if not _WEIGHTS.fullmatch(word))
