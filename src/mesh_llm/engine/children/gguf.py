"""Child: what GGUF files hold, read through the engine's own `gguf_*` functions.

Reads one JSON line `{"paths": [...], "fingerprint": bool}` from stdin and writes
one to stdout for every path, in order: either `{"index", "metadata", "tensors",
"files", "architecture_known", "fingerprint"}` or `{"index", "error", "hint"}`,
where the index is the path's place among those asked for. It runs in a process
of its own because the parser is C++ and the files are anybody's: one that ends
early died of the file that it has not answered for.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from mesh_llm.defaults import (
    FINGERPRINT_SAMPLE_BYTES,
    FINGERPRINT_STRIDE_BYTES,
    GGUF_SHARD_LIMIT,
    INSPECT_LINE_BYTES,
)
from mesh_llm.engine.library import Engine
from mesh_llm.errors import MeshError, ModelError

GGUF_ARRAY_LIMIT = 1024
"""Per-layer arrays have at most 512 entries; longer ones are vocabularies."""
GGUF_TEXT_LIMIT_BYTES = 1 << 20
"""Longer texts are left out, but for the one that is used whatever its length."""
_CHAT_TEMPLATE = "tokenizer.chat_template"
INSPECT_MEMORY_BYTES = 8 << 30
"""Address space of the child that parses model files: the engine's module, a large vocabulary, no more."""


_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")

# enum gguf_type: the reader of each scalar; 8 is string, 9 is array
_SCALARS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}
_STRING, _ARRAY = 8, 9

_ARCHITECTURE_NAME = "_Z13llm_arch_name8llm_arch"
"""const char * llm_arch_name(llm_arch): of numbers from 0 on, all of them."""
_ARCHITECTURE_LIMIT = 4096
_NO_ARCHITECTURES = {"unknown", "(unknown)", "clip"}
"""What it says beyond the last one, what it calls a mistake, and a projector's, which only tools take."""


class _InitParams(ctypes.Structure):
    """struct gguf_init_params"""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class GgufFile:
    """One open GGUF file. Keys and tensors by index, as the C API has them."""

    def __init__(self, native: ctypes.CDLL, path: Path) -> None:
        self.native = native
        self.path = path
        self.handle = native.gguf_init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
        if not self.handle:
            raise ModelError(
                f"{path} is not a readable GGUF file",
                hint="download it again; the file is damaged or in another format",
            )

    def metadata(self) -> dict[str, Any]:
        count = self.native.gguf_get_n_kv(self.handle)
        keys = [self.native.gguf_get_key(self.handle, i).decode(errors="replace") for i in range(count)]
        return {key: self._value(i, in_full=key == _CHAT_TEMPLATE) for i, key in enumerate(keys)}

    def _value(self, index: int, *, in_full: bool) -> Any:
        kind = self.native.gguf_get_kv_type(self.handle, index)
        if kind == _STRING:
            text = self.native.gguf_get_val_str(self.handle, index)
            wanted = in_full or len(text) <= GGUF_TEXT_LIMIT_BYTES
            return text.decode(errors="replace") if wanted else {"length": len(text)}
        if kind == _ARRAY:
            return self._array(index)
        name, _ = _SCALARS[kind]
        value = getattr(self.native, f"gguf_get_val_{name}")(self.handle, index)
        return value if value == value else None  # NaN is not JSON

    def _array(self, index: int) -> Any:
        """Short arrays of numbers in full; the vocabulary and its like by length alone."""
        count = self.native.gguf_get_arr_n(self.handle, index)
        kind = self.native.gguf_get_arr_type(self.handle, index)
        if kind not in _SCALARS or count > GGUF_ARRAY_LIMIT:
            return {"length": count}
        _, ctype = _SCALARS[kind]
        data = self.native.gguf_get_arr_data(self.handle, index)
        return list(ctypes.cast(data, ctypes.POINTER(ctype))[:count]) if count else []

    def tensors(self) -> Iterator[tuple[str, str, list[int], int, int]]:
        """(name, type, shape, size, offset in the file) of every tensor."""
        data_offset = self.native.gguf_get_data_offset(self.handle)
        for i in range(self.native.gguf_get_n_tensors(self.handle)):
            type_id = self.native.gguf_get_tensor_type(self.handle, i)
            yield (
                self.native.gguf_get_tensor_name(self.handle, i).decode(errors="replace"),
                self.native.ggml_type_name(type_id).decode(),
                list(self.native.gguf_get_tensor_ne(self.handle, i)[:4]),
                self.native.gguf_get_tensor_size(self.handle, i),
                data_offset + self.native.gguf_get_tensor_offset(self.handle, i),
            )

    @property
    def data_offset(self) -> int:
        return int(self.native.gguf_get_data_offset(self.handle))

    def close(self) -> None:
        """A vocabulary is large, and whoever lists files reads many."""
        self.native.gguf_free(self.handle)


@cache
def architectures(native: ctypes.CDLL) -> frozenset[str]:
    """All that the engine can run; none where it does not say."""
    try:
        name = getattr(native, _ARCHITECTURE_NAME)
    except AttributeError:
        return frozenset()
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names = (name(number).decode(errors="replace") for number in range(_ARCHITECTURE_LIMIT))
    return frozenset(takewhile(lambda each: each != "unknown", names)) - _NO_ARCHITECTURES


def shard_paths(path: Path) -> list[Path]:
    """All files of the model that `path` is (any shard of), in order."""
    match = _SHARD.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= count <= GGUF_SHARD_LIMIT:
        raise ModelError(f"{path} claims to be one of {count} files; at most {GGUF_SHARD_LIMIT} work")
    paths = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise ModelError(
            f"{path.name} needs {count} files and {len(missing)} of them are missing: "
            f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}",
            hint=f"put them beside it in {path.parent}",
        )
    return paths


def read_model(native: ctypes.CDLL, path: Path, *, fingerprint: bool) -> dict[str, Any]:
    paths = shard_paths(path)
    metadata: dict[str, Any] = {}
    tensors: list[list[Any]] = []
    files: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    for index, shard in enumerate(paths):
        with closing(GgufFile(native, shard)) as gguf:
            table = list(gguf.tensors())
            data_offset = gguf.data_offset
            if index == 0:
                metadata = gguf.metadata()
        size = shard.stat().st_size
        end = max((offset + length for *_, length, offset in table), default=0)
        if end > size:
            raise ModelError(
                f"{shard} is cut short: it has {size:,} bytes and its tensors need {end:,}",
                hint="download it again",
            )
        tensors += [[name, kind, shape, length, index, offset] for name, kind, shape, length, offset in table]
        files.append({"path": str(shard), "bytes": size, "data_offset": data_offset})
        if fingerprint:
            _digest_file(digest, shard, size, data_offset, table)
    declared = metadata.get("split.count", 1) or 1
    if declared != len(paths):
        raise ModelError(
            f"{path.name} is one of {declared} files of a model, but its name does not say so",
            hint="give the files their original names, such as model-00001-of-00003.gguf",
        )
    known = architectures(native)
    return {
        "metadata": metadata,
        "tensors": tensors,
        "files": files,
        "architecture_known": metadata.get("general.architecture") in known if known else None,
        "fingerprint": digest.hexdigest()[:32] if fingerprint else None,
    }


def _digest_file(
    digest: hashlib._Hash,
    path: Path,
    size: int,
    data_offset: int,
    table: list[tuple[str, str, list[int], int, int]],
) -> None:
    """Header and tensor table in full, and of each tensor a sample every few MB.

    Reading a 50 GB file takes a minute; this takes well under a second and
    tells files apart that share names and shapes, such as two fine-tunes.
    """
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(min(1 << 20, data_offset - file.tell())), b""):
            digest.update(chunk)
        descriptor = file.fileno()
        for *_, length, offset in table:
            for start in range(0, length, FINGERPRINT_STRIDE_BYTES):
                wanted = min(FINGERPRINT_SAMPLE_BYTES, length - start)
                digest.update(os.pread(descriptor, wanted, offset + start))


def declare(native: ctypes.CDLL) -> None:
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    i64, enum = ctypes.c_int64, ctypes.c_int
    signatures: dict[str, tuple[object, list[object]]] = {
        "gguf_init_from_file": (pointer, [text, _InitParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_kv": (i64, [pointer]),
        "gguf_get_key": (text, [pointer, i64]),
        "gguf_get_kv_type": (enum, [pointer, i64]),
        "gguf_get_arr_type": (enum, [pointer, i64]),
        "gguf_get_val_str": (text, [pointer, i64]),
        "gguf_get_arr_n": (size, [pointer, i64]),
        "gguf_get_arr_data": (pointer, [pointer, i64]),
        "gguf_get_data_offset": (size, [pointer]),
        "gguf_get_n_tensors": (i64, [pointer]),
        "gguf_get_tensor_name": (text, [pointer, i64]),
        "gguf_get_tensor_type": (enum, [pointer, i64]),
        "gguf_get_tensor_ne": (ctypes.POINTER(i64), [pointer, i64]),
        "gguf_get_tensor_size": (size, [pointer, i64]),
        "gguf_get_tensor_offset": (size, [pointer, i64]),
        "ggml_type_name": (text, [enum]),
    }
    for name, ctype in _SCALARS.values():
        signatures[f"gguf_get_val_{name}"] = (ctype, [pointer, i64])
    for name, (result, arguments) in signatures.items():
        function = getattr(native, name)
        function.restype = result
        function.argtypes = arguments


def limit_memory() -> None:
    """A file that claims a petabyte of keys gets an error, not the machine's memory."""
    # macOS knows the limit and refuses to set it.
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = INSPECT_MEMORY_BYTES if most == resource.RLIM_INFINITY else min(most, INSPECT_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, most))


@cache
def _native() -> ctypes.CDLL:
    native = Engine.load().native
    declare(native)
    return native


def _answer(path: Path, *, fingerprint: bool) -> dict[str, Any]:
    try:
        return read_model(_native(), path, fingerprint=fingerprint)
    except MeshError as error:
        return {"error": error.message, "hint": error.hint}
    except OSError as error:
        return {"error": f"cannot read {path}: {error.strerror}", "hint": None}


def _line(index: int, path: Path, *, fingerprint: bool) -> str:
    line = json.dumps({"index": index, **_answer(path, fingerprint=fingerprint)})
    if len(line) <= INSPECT_LINE_BYTES:
        return line
    error = f"{path} has a header of more than {INSPECT_LINE_BYTES:,} bytes"
    return json.dumps({"index": index, "error": error, "hint": "no model needs that; choose another file"})


def main() -> None:
    limit_memory()
    request = json.loads(sys.stdin.readline())
    for index, path in enumerate(request["paths"]):
        print(_line(index, Path(path), fingerprint=request["fingerprint"]), flush=True)


if __name__ == "__main__":
    main()
