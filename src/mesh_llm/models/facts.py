"""From the metadata and tensor table of a GGUF to the facts that planning needs. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_llm.defaults import EXPERTS
from mesh_llm.models.cache_layout import (
    ENCODERS,
    SNAPSHOTS,
    WITHOUT_CACHE,
    joined_layers,
    layer_caches,
    mtp_cache,
    query_elements,
)
from mesh_llm.models.layer_weights import Tensor, head_weights, layer_weights, operations
from mesh_llm.models.metadata import Metadata, damaged
from mesh_llm.types import Fingerprint, Layer, ModelFacts

_LAYERS_LIMIT = 512
_HIDDEN_LIMIT = 1 << 20
_EXPERTS_LIMIT = 1024
_CONTEXT_LIMIT = (1 << 31) - 1
_TENSOR_BYTES_LIMIT = 1 << 44
_POOLING_RANK = 4
"""enum llama_pooling_type: after none, mean, cls and last."""

_BLOCK = re.compile(r"(?:enc\.)?blk\.(\d{1,6})\.")
_EXPERTS = re.compile(EXPERTS)
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")

_FILE_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K "
    "IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - "
    "TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0 Q2_0"
)
"""enum llama_ftype, in order; the gaps are types that no longer exist."""
_FILE_TYPES = dict(enumerate(_FILE_TYPE_NAMES.split()))


def model_facts(document: Mapping[str, Any]) -> ModelFacts:
    """What `engine/children/gguf.py` printed about a file, checked and put into words."""
    files = _files(document)
    file = files[0].name
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise damaged(file, "it has no metadata")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise damaged(file, "it does not say its general.architecture")
    keys = Metadata(file=file, architecture=architecture, metadata=metadata)
    tensors = _tensors(file, document)
    layers = keys.number("block_count", minimum=1, maximum=_LAYERS_LIMIT)
    hidden = keys.number("embedding_length", minimum=1, maximum=_HIDDEN_LIMIT)
    layer_bytes = _layer_bytes(keys, tensors, layers)
    chosen = [tensor for tensor in tensors if _EXPERTS.search(tensor.name)]
    expert_bytes = _layer_bytes(keys, chosen, layers)
    of_layers = _of_layers(tensors, layers)
    caches = layer_caches(keys, layers=layers, hidden=hidden)
    embedding = _bytes_of(tensors, "token_embd.weight")
    head = _bytes_of(tensors, "output.weight")
    experts = keys.number("expert_count", default=0, maximum=_EXPERTS_LIMIT)
    used = max(keys.per_layer("expert_used_count", layers, default=0))
    if used > experts:
        keys.damaged(f"it uses {used} experts of {experts}")
    return ModelFacts(
        files=files,
        fingerprint=Fingerprint(_text(file, document, "fingerprint")),
        size_bytes=_size_bytes(file, document),
        name=_name(metadata, files[0]),
        architecture=architecture,
        quantisation=_quantisation(metadata, tensors),
        layers=tuple(
            Layer(
                weight_bytes=size,
                cache=cache,
                expert_bytes=expert_size,
                weights=layer_weights(own, used),
                operations=operations(own, used),
            )
            for size, cache, expert_size, own in zip(
                layer_bytes, caches, expert_bytes, of_layers, strict=True
            )
        ),
        embedding_bytes=embedding,
        head_bytes=head,
        other_bytes=sum(tensor.size_bytes for tensor in tensors) - sum(layer_bytes) - embedding - head,
        hidden=hidden,
        feed_forward=max(keys.per_layer("feed_forward_length", layers, default=0)),
        heads=max(keys.per_layer("attention.head_count", layers, default=0)),
        vocabulary=_vocabulary(keys, metadata, tensors),
        context_trained=keys.number("context_length", minimum=1, maximum=_CONTEXT_LIMIT),
        experts=experts,
        experts_used=used,
        expert_feed_forward=_expert_feed_forward(keys, layers) if experts else 0,
        query_elements=query_elements(keys, layers=layers, hidden=hidden),
        widest=_widest(tensors, used),
        causal=architecture not in WITHOUT_CACHE and keys.flag("attention.causal", default=True),
        pooled=keys.number("pooling_type", default=0) > 0,
        encodes=architecture in ENCODERS or keys.number("pooling_type", default=0) > 0,
        ranks=keys.number("pooling_type", default=0) == _POOLING_RANK,
        # Some files leave the layer out that their metadata speaks of.
        mtp_cache=mtp_cache(keys, layers=layers, hidden=hidden)
        if _bytes_of(tensors, f"blk.{layers - 1}.nextn.eh_proj.weight")
        else None,
        keeps_snapshots=architecture in SNAPSHOTS,
        read_layers=keys.numbers("target_layers", maximum=_LAYERS_LIMIT),
        read_width=keys.number("target_hidden_size", default=0, maximum=_HIDDEN_LIMIT),
        head=head_weights(tensors),
        joined_layers=joined_layers(keys, layers),
        chat_template=_optional_text(metadata, "tokenizer.chat_template"),
    )


def _files(document: Mapping[str, Any]) -> tuple[Path, ...]:
    files = document.get("files")
    if not isinstance(files, list) or not files:
        raise damaged("the model", "no files are listed")
    paths = [entry.get("path") if isinstance(entry, dict) else None for entry in files]
    if not all(isinstance(path, str) and path for path in paths):
        raise damaged("the model", "a file without a path is listed")
    return tuple(Path(str(path)) for path in paths)


def _size_bytes(file: str, document: Mapping[str, Any]) -> int:
    sizes = [entry.get("bytes") for entry in document["files"]]
    if not all(_is_size(size, _TENSOR_BYTES_LIMIT) for size in sizes):
        raise damaged(file, "the size of a file is missing")
    return sum(sizes)


def _is_size(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _text(file: str, document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise damaged(file, f"its {key} is missing")
    return value


def _optional_text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) and value.strip() else None


def _tensors(file: str, document: Mapping[str, Any]) -> list[Tensor]:
    rows = document.get("tensors")
    if not isinstance(rows, list) or not rows:
        raise damaged(file, "it has no tensors")
    return [_tensor(file, row) for row in rows]


def _tensor(file: str, row: Any) -> Tensor:
    match row:
        case [str(name), str(kind), list(shape), size, *_] if (
            _is_size(size, _TENSOR_BYTES_LIMIT)
            and shape
            and all(_is_size(length, _TENSOR_BYTES_LIMIT) for length in shape)
        ):
            return Tensor(name=name, kind=kind, shape=tuple(shape), size_bytes=size)
    raise damaged(file, "its tensor table cannot be read")


def _layer_bytes(keys: Metadata, tensors: list[Tensor], layers: int) -> list[int]:
    sizes = [0] * layers
    for tensor in tensors:
        if match := _BLOCK.match(tensor.name):
            index = int(match[1])
            if index >= layers:
                keys.damaged(f"it claims {layers} layers and has {tensor.name}")
            sizes[index] += tensor.size_bytes
    return sizes


def _of_layers(tensors: list[Tensor], layers: int) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[] for _ in range(layers)]
    for tensor in tensors:
        if match := _BLOCK.match(tensor.name):
            found[int(match[1])].append(tensor)
    return found


def _bytes_of(tensors: list[Tensor], name: str) -> int:
    return sum(tensor.size_bytes for tensor in tensors if tensor.name == name)


def _name(metadata: Mapping[str, Any], file: Path) -> str:
    name = _optional_text(metadata, "general.name")
    return name.strip() if name else _SHARD_SUFFIX.sub("", file.stem)


def _quantisation(metadata: Mapping[str, Any], tensors: list[Tensor]) -> str:
    told = metadata.get("general.file_type")
    known = _FILE_TYPES.get(told, "-") if isinstance(told, int) and not isinstance(told, bool) else "-"
    if known != "-":
        return known
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.kind] += tensor.size_bytes
    return sizes.most_common(1)[0][0].upper()


def _vocabulary(keys: Metadata, metadata: Mapping[str, Any], tensors: list[Tensor]) -> int:
    """Tokens that the engine computes logits for: the tokenizer's list, else what the sizes say."""
    match metadata.get("tokenizer.ggml.tokens"):
        case {"length": int(length)} if 0 < length < 1 << 24:
            return length
        case list(tokens) if tokens:
            return len(tokens)
    rows = [
        tensor.shape[1] for tensor in tensors if tensor.name == "token_embd.weight" and len(tensor.shape) > 1
    ]
    return keys.number("vocab_size", default=min(rows[0], 1 << 24) if rows else 0)


def _expert_feed_forward(keys: Metadata, layers: int) -> int:
    # Older mixtures, such as Mixtral, give the width of an expert as that of the feed-forward.
    key = "expert_feed_forward_length" if keys.has("expert_feed_forward_length") else "feed_forward_length"
    return max(keys.per_layer(key, layers, default=0))


def _widest(tensors: list[Tensor], experts_used: int) -> int:
    """Rows of the largest matrix of a layer: of an expert's, once for each expert chosen."""
    widths = [0]
    for tensor in tensors:
        if _BLOCK.match(tensor.name) and tensor.name.endswith(".weight") and len(tensor.shape) > 1:
            expert = "_exps." in tensor.name
            widths.append(tensor.shape[1] * (experts_used if expert else 1))
    return max(widths)
