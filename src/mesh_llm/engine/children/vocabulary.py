"""Child: whether one model can guess for another, by the words that they know.

Reads one JSON line `{"model", "draft"}` (paths) from stdin and writes one to
stdout: `{"differs": null}` where guesses can be taken over token by token,
`{"differs": "…"}` with the reason where not, or `{"error", "hint"}`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_llm.engine.children.gguf import GgufFile, declare, limit_memory
from mesh_llm.engine.library import Engine
from mesh_llm.errors import MeshError

_TOKENS = "tokenizer.ggml.tokens"
_SIZE_DIFFERENCE = 128
"""Vocabularies of one family are padded to different lengths; beyond what both have, nothing is guessed."""
_FIRST_COMPARED = 5
"""The engine itself does not compare the ones before: control tokens, by many names."""

_SAME = {
    "tokenizer.ggml.model": "another kind of tokenizer",
    "tokenizer.ggml.add_bos_token": "another way to start a text",
    "tokenizer.ggml.add_eos_token": "another way to end a text",
}
_SAME_IF_ADDED = (
    ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", True, "another start token"),
    ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token", False, "another end token"),
)
"""Tokens that count only where every text gets one, and whether it does if the file does not say.

A chat model ends with another token than the base model of its family, which can draft for it.
"""


def difference(model: GgufFile, draft: GgufFile) -> str | None:
    """Why the engine would refuse the draft; None where it takes it."""
    if reason := tokenizers_differ(model.metadata(), draft.metadata()):
        return reason
    counts = [_count(file) for file in (model, draft)]
    if 0 in counts:
        return "one of them has no vocabulary"
    if abs(counts[0] - counts[1]) > _SIZE_DIFFERENCE:
        return f"it knows {counts[1]:,} tokens instead of {counts[0]:,}"
    for index, (one, other) in enumerate(zip(_tokens(model), _tokens(draft), strict=False)):
        if index >= _FIRST_COMPARED and one != other:
            return f"its token {index} is {_shown(other)} instead of {_shown(one)}"
    return None


def tokenizers_differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The same, as far as it can be seen without the words themselves."""
    compared = list(_SAME.items())
    for key, added, default, what in _SAME_IF_ADDED:
        if ours.get(added, default) or theirs.get(added, default):
            compared.append((key, what))
    for key, what in compared:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            return f"it has {what} ({theirs[key]} instead of {ours[key]})"
    return None


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])


def _count(file: GgufFile) -> int:
    index = file.native.gguf_find_key(file.handle, _TOKENS.encode())
    return int(file.native.gguf_get_arr_n(file.handle, index)) if index >= 0 else 0


def _tokens(file: GgufFile) -> list[bytes]:
    index = file.native.gguf_find_key(file.handle, _TOKENS.encode())
    get = file.native.gguf_get_arr_str
    return [get(file.handle, index, i) for i in range(_count(file))]


def main() -> None:
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    limit_memory()
    try:
        native = Engine.load().native
        declare(native)
        native.gguf_find_key.restype = ctypes.c_int64
        native.gguf_find_key.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        native.gguf_get_arr_str.restype = ctypes.c_char_p
        native.gguf_get_arr_str.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t]
        files = (GgufFile(native, Path(request[name])) for name in ("model", "draft"))
        answer: dict[str, Any] = {"differs": difference(*files)}
    except MeshError as error:
        answer = {"error": error.message, "hint": error.hint}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
