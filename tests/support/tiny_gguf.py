"""Tiny GGUF models with random weights that the engine loads and generates with.

The same arguments give the same file, byte for byte, so that a test may
compare what two ways of running a model answer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny_blueprints import Blueprint, Dimensions, architectures, blueprint

ARCHITECTURES = architectures()

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3
_ALIGNMENT = 32
# Kept exact in every quantisation: the engine reads these as F32 only, or quantising them pays nothing.
_EXACT = ("ssm_conv1d", "ssm_a", "ssm_d", "shortconv.conv", "ffn_gate_inp", "exp_probs_b", "ssm_norm")


def write(
    path: Path,
    architecture: str,
    *,
    layers: int = 4,
    hidden: int = 64,
    vocabulary: int = 512,
    seed: int = 0,
    quantisation: str = "F32",
    tokenizer: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    **sizes: int,
) -> Path:
    """Write one model file. `sizes` are further fields of `Dimensions`.

    `metadata` (by keys below the architecture's) and `tensors` come on top.

    `tokenizer` is another GGUF to take the vocabulary from; without it the
    vocabulary is bytes, three control tokens and merges of two letters.
    """
    plain = _model(architecture, layers, hidden, vocabulary, tokenizer, sizes)
    model = replace(
        plain,
        metadata={**plain.metadata, **(metadata or {})},
        tensors={**plain.tensors, **(tensors or {})},
    )
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, model, quantisation, tokenizer)
    for name in model.tensors:
        _add_tensor(writer, model, name, seed, quantisation)
    finish(writer)
    return path


def write_projector(
    path: Path, kind: str = "mlp", *, hidden: int = 64, image: int = 32, patch: int = 8, seed: int = 0
) -> Path:
    """One for a model of that width: like llava's, or of another `kind` that the engine knows.

    An image becomes (image / patch)² tokens; of kinds that merge patches, a quarter of them.
    """
    width, layers = 32, 2
    writer: Any = gguf.GGUFWriter(path, "clip")
    writer.add_name("Tiny projector")
    writer.add_file_type(_file_type("F32"))
    vision = {
        "image_size": image,
        "patch_size": patch,
        "embedding_length": width,
        "feed_forward_length": 2 * width,
        "block_count": layers,
        "projection_dim": hidden,
        "attention.head_count": 2,
        "attention.layer_norm_epsilon": 1e-5,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "projector.scale_factor": 2,
        "spatial_merge_size": 2,
    }
    told = {"has_vision_encoder": True, "projector_type": kind, "use_gelu": True}
    for key, value in {**told, **{f"vision.{key}": value for key, value in vision.items()}}.items():
        add_value(writer, f"clip.{key}", value)
    tensors = _PROJECTORS[kind](width, hidden, (image // patch) ** 2)
    tensors["v.patch_embd.weight"] = (width, 3, patch, patch)
    for layer in range(layers):
        tensors |= _vision_layer(f"v.blk.{layer}", width, fused=kind == "qwen3vl_merger")
    for name, shape in tensors.items():
        writer.add_tensor(name, values(name, shape, seed))
    finish(writer)
    return path


Shapes = dict[str, tuple[int, ...]]


def _vision_layer(part: str, width: int, *, fused: bool) -> Shapes:
    shapes: Shapes = {}
    squares = {"attn_qkv": 3 * width} if fused else dict.fromkeys(("attn_q", "attn_k", "attn_v"), width)
    for name, rows in {**squares, "attn_out": width, "ffn_up": 2 * width}.items():
        shapes |= {f"{part}.{name}.weight": (rows, width), f"{part}.{name}.bias": (rows,)}
    shapes |= {f"{part}.ffn_down.weight": (width, 2 * width), f"{part}.ffn_down.bias": (width,)}
    for name in ("ln1", "ln2"):
        shapes |= {f"{part}.{name}.weight": (width,), f"{part}.{name}.bias": (width,)}
    return shapes


def _perceptron(name: str, inner: int, outer: int, second: str) -> Shapes:
    return {
        f"{name}.weight": (outer, inner),
        f"{name}.bias": (outer,),
        f"{second}.weight": (outer, outer),
        f"{second}.bias": (outer,),
    }


def _llava(width: int, hidden: int, patches: int) -> Shapes:
    return {
        "v.class_embd": (width,),
        "v.position_embd.weight": (patches + 1, width),
        "v.pre_ln.weight": (width,),
        "v.pre_ln.bias": (width,),
        **_perceptron("mm.0", width, hidden, "mm.2"),
    }


def _gemma3(width: int, hidden: int, patches: int) -> Shapes:
    return {
        "v.position_embd.weight": (patches, width),
        "v.patch_embd.bias": (width,),
        "v.post_ln.weight": (width,),
        "v.post_ln.bias": (width,),
        "mm.soft_emb_norm.weight": (width,),
        "mm.input_projection.weight": (width, hidden),
    }


def _qwen2vl(width: int, hidden: int, patches: int) -> Shapes:
    return {
        "v.patch_embd.weight.1": (width, 3, 8, 8),
        "v.post_ln.weight": (width,),
        "v.post_ln.bias": (width,),
        **_perceptron("mm.0", 4 * width, hidden, "mm.2"),
    }


def _qwen3vl(width: int, hidden: int, patches: int) -> Shapes:
    """What its two layers see goes to the model's first two layers, too."""
    shapes = _qwen2vl(width, hidden, patches)
    shapes |= {"v.patch_embd.bias": (width,), "v.position_embd.weight": (patches, width)}
    for part in ("v.deepstack.0", "v.deepstack.1"):
        shapes |= {f"{part}.norm.weight": (4 * width,), f"{part}.norm.bias": (4 * width,)}
        shapes |= _perceptron(f"{part}.fc1", 4 * width, hidden, f"{part}.fc2")
    return shapes


_PROJECTORS = {"mlp": _llava, "gemma3": _gemma3, "qwen2vl_merger": _qwen2vl, "qwen3vl_merger": _qwen3vl}


def write_adapter(
    path: Path,
    model: Path,
    *,
    among: tuple[str, ...] = ("attn_q.weight", "ffn_down", "output.weight"),
    rank: int = 4,
    seed: int = 0,
    quantisation: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A LoRA adapter for the tensors of a model with one of these in their names."""
    read = gguf.GGUFReader(model)
    writer: Any = gguf.GGUFWriter(path, read.fields["general.architecture"].contents())
    told = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0 * rank}
    for key, value in {**told, **(metadata or {})}.items():
        add_value(writer, key, value)
    for tensor in read.tensors:
        if len(tensor.shape) > 1 and any(part in tensor.name for part in among):
            inner, outer, *experts = map(int, tensor.shape)
            for part, shape in (("lora_a", (rank, inner)), ("lora_b", (outer, rank))):
                weights = values(f"{tensor.name}.{part}", (*reversed(experts), *shape), seed)
                kind = _tensor_type(tensor.name, shape, quantisation)
                exact = kind is gguf.GGMLQuantizationType.F32
                data = weights if exact else gguf.quants.quantize(weights, kind)
                writer.add_tensor(f"{tensor.name}.{part}", data, raw_dtype=None if exact else kind)
    finish(writer)
    return path


def write_shards(
    path: Path,
    count: int,
    architecture: str,
    *,
    layers: int = 4,
    hidden: int = 64,
    vocabulary: int = 512,
    seed: int = 0,
    quantisation: str = "F32",
    tokenizer: Path | None = None,
    **sizes: int,
) -> list[Path]:
    """Write the model of `write` as `count` files beside `path`, named after its stem."""
    model = _model(architecture, layers, hidden, vocabulary, tokenizer, sizes)
    names = list(model.tensors)
    paths = [path.with_name(f"{path.stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for index, shard in enumerate(paths):
        writer = gguf.GGUFWriter(shard, architecture)
        if index == 0:
            _add_metadata(writer, model, quantisation, tokenizer)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[index * len(names) // count : (index + 1) * len(names) // count]:
            _add_tensor(writer, model, name, seed, quantisation)
        finish(writer)
    return paths


def write_sparse(path: Path, **sizes: int) -> Path:
    """A llama in F16 with a hole for weights: many gigabytes of zeros that take no room on the disk."""
    model = blueprint("llama", Dimensions(**sizes))
    writer: Any = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, model, "F16", None)
    for name, shape in model.tensors.items():
        kind = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(name, shape, kind, math.prod(shape) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sizes_bytes = [path.stat().st_size, *(info.nbytes for info in writer.tensors[0].values())]
    with path.open("r+b") as file:
        file.truncate(sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes_bytes))
    return path


def write_large(path: Path, quantisation: str, *, seed: int = 0, **sizes: int) -> Path:
    """A llama of any size, written about as fast as the disk takes it.

    Its weights are drawn, block by block, from a pool of quantised ones.
    """
    model = blueprint("llama", Dimensions(**sizes))
    random = np.random.default_rng(seed)
    writer: Any = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    _add_metadata(writer, model, quantisation, None)
    kinds = {name: _tensor_type(name, shape, quantisation) for name, shape in model.tensors.items()}
    for name, shape in model.tensors.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        exact = kinds[name] is gguf.GGMLQuantizationType.F32
        kind = np.dtype(np.float32 if exact else np.uint8)
        writer.add_tensor_info(
            name,
            shape if exact else stored,
            kind,
            math.prod(stored),
            raw_dtype=None if exact else kinds[name],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools: dict[int, Any] = {}
    for name, shape in model.tensors.items():
        if kinds[name] is gguf.GGMLQuantizationType.F32:
            writer.write_tensor_data(values(name, shape, seed))
            continue
        block, _ = gguf.GGML_QUANT_SIZES[kinds[name]]
        if shape[-1] not in pools:
            noise = random.standard_normal((1 << 16, block)).astype(np.float32)
            pools[shape[-1]] = gguf.quants.quantize(noise / np.float32(math.sqrt(shape[-1])), kinds[name])
        chosen = random.integers(0, 1 << 16, math.prod(shape) // block, dtype=np.uint16)
        writer.write_tensor_data(pools[shape[-1]][chosen])
    writer.close()
    return path


def _model(
    architecture: str,
    layers: int,
    hidden: int,
    vocabulary: int,
    tokenizer: Path | None,
    sizes: dict[str, int],
) -> Blueprint:
    if tokenizer is not None:
        vocabulary = len(gguf.GGUFReader(tokenizer).fields["tokenizer.ggml.tokens"].data)
    dimensions = Dimensions(layers=layers, hidden=hidden, vocabulary=vocabulary, **sizes)
    return blueprint(architecture, dimensions)


def _add_metadata(writer: Any, model: Blueprint, quantisation: str, tokenizer: Path | None) -> None:
    writer.add_name(f"Tiny {model.architecture}")
    writer.add_file_type(_file_type(quantisation))
    for key, value in model.metadata.items():
        whole = key.startswith("tokenizer.")
        add_value(writer, key if whole else f"{model.architecture}.{key}", value)
    if tokenizer is None:
        add_byte_tokenizer(writer, model.dimensions.vocabulary)
    else:
        _copy_tokenizer(writer, tokenizer)
    writer.add_chat_template(CHAT_TEMPLATE)


def _file_type(quantisation: str) -> int:
    name = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M"}.get(quantisation, f"MOSTLY_{quantisation}")
    return int(gguf.LlamaFileType[name])


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]


def add_byte_tokenizer(writer: Any, vocabulary: int) -> None:
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges = [f"{a} {b}" for a in letters for b in letters]
    fixed = [*_SPECIAL, *_byte_characters()]
    if vocabulary <= len(fixed):
        raise ValueError(f"a vocabulary of at least {len(fixed) + 1} tokens, please")
    merges = merges[: vocabulary - len(fixed)]
    # Beyond those, tokens that no text has.
    fixed += [f"<unused {index}>" for index in range(vocabulary - len(fixed) - len(merges))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(fixed + [merge.replace(" ", "") for merge in merges])
    writer.add_token_types([_CONTROL_TOKEN] * len(_SPECIAL) + [_NORMAL_TOKEN] * (vocabulary - len(_SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _copy_tokenizer(writer: Any, source: Path) -> None:
    for key, entry in gguf.GGUFReader(source).fields.items():
        if not key.startswith("tokenizer.ggml."):
            continue
        if entry.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, entry.contents())
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])


def _add_tensor(writer: Any, model: Blueprint, name: str, seed: int, quantisation: str) -> None:
    shape = model.tensors[name]
    weights = values(name, shape, seed) * np.float32(_emphasis(model, name))
    kind = _tensor_type(name, shape, quantisation)
    if kind is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, weights)
    elif kind is gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, weights.astype(np.float16))
    else:
        writer.add_tensor(name, _quantised(weights, kind), raw_dtype=kind)


def _quantised(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    return _q4_k(values) if kind is gguf.GGMLQuantizationType.Q4_K else gguf.quants.quantize(values, kind)


def _q4_k(values: Any) -> Any:
    """What the gguf package reads but cannot write: 256 values as 8 times 32, x = d·scale·q - dmin·least."""
    groups = values.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + least) / 15
    d, dmin = (np.float16(each.max(axis=1, keepdims=True) / 63) for each in (scale, least))
    scales = _six_bits(scale, d)
    leasts = _six_bits(least, dmin)
    step = (np.float32(d) * scales)[:, :, None]
    shifted = groups + (np.float32(dmin) * leasts)[:, :, None]
    q = np.clip(np.rint(shifted / np.where(step == 0, 1, step)), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    # Six bits each: of the first four in a byte of its own, of the others the upper two in those bytes.
    head = [each[:, :4] | (each[:, 4:] >> 4) << 6 for each in (scales, leasts)]
    tail = (scales[:, 4:] & 15) | (leasts[:, 4:] & 15) << 4
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    block = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *head, tail, nibbles], axis=1)
    return block.reshape(*values.shape[:-1], -1)


def _six_bits(each: Any, unit: Any) -> Any:
    wide = np.float32(unit)
    return np.clip(np.rint(each / np.where(wide == 0, 1, wide)), 0, 63).astype(np.uint8)


def _tensor_type(name: str, shape: tuple[int, ...], quantisation: str) -> gguf.GGMLQuantizationType:
    kind = gguf.GGMLQuantizationType[quantisation]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    exact = len(shape) == 1 or "bias" in name or any(part in name for part in _EXACT)
    return gguf.GGMLQuantizationType.F32 if exact or shape[-1] % block else kind


def _emphasis(model: Blueprint, name: str) -> float:
    """Factors that make the likeliest token stand out, and not be the one just read.

    Logits of spread 1 come in near-ties, which any change of the order of
    additions may turn over. And where the head is the embedding, a token's own
    row answers itself, unless it is small beside what the layers add to it.
    """
    if "output.weight" in model.tensors:
        return 4.0 if name == "output.weight" else 1.0
    return {"token_embd.weight": 0.05, "output_norm.weight": 12.0, "token_embd_norm.weight": 12.0}.get(
        name, 1.0
    )


def values(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """Weights at which activations stay near one, so that nothing overflows or dies out."""
    # A stream of its own for every tensor: adding one to an architecture leaves the others as they are.
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = random.standard_normal(shape).astype(np.float32)
    if "norm" in name and not name.endswith("bias"):
        return 1 + np.float32(0.1) * noise
    if name.endswith("ssm_a"):
        return -np.exp(np.float32(0.5) * noise)
    if name.endswith("ssm_d"):
        return np.ones(shape, np.float32)
    if name.endswith("bias"):
        return np.float32(0.1) * noise
    if name.startswith("token_embd") or len(shape) == 1:
        return noise
    return noise / np.float32(math.sqrt(shape[-1]))


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
