"""Child: takes llama.cpp's web page out of the engine.

Reads one JSON line `{"target": path}`, writes the page's files there as a zip archive, each as the engine
has it: packed with gzip.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_llm.engine.library import find_wheel
from mesh_llm.errors import EngineMissing, MeshError

_STRING_BYTES = {
    "_Z19llama_ui_find_assetRKSs": 8,
    "_Z19llama_ui_find_assetRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE": 32,
    "_Z19llama_ui_find_assetRKNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEEE": 24,
}
"""Of a std::string, by what the compiler that made the engine calls a function that takes one: libstdc++
before and since C++11, and libc++ on Apple's processors (untried)."""
_COUNT = re.compile(rb"arrayI14llama_ui_assetLm([0-9]+)E")
"""How many files there are is part of a type, and told by nothing but that type's name."""
_INLINE = 24
_EPOCH = (2020, 1, 1, 0, 0, 0)
"""Equal pages give equal archives."""


def main() -> None:
    request = json.loads(sys.stdin.readline())
    try:
        answer: dict[str, Any] = {"files": _write(Path(request["target"]))}
    except (MeshError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _write(target: Path) -> int:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _files(find_wheel().module):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
        return len(archive.namelist())


def _files(module: Path) -> Iterator[tuple[str, bytes]]:
    """struct llama_ui_asset, tools/ui/ui.h.in: name, data, size, tag, type."""
    count = _count(module)
    native = ctypes.CDLL(str(module))
    string_bytes = next((size for name, size in _STRING_BYTES.items() if hasattr(native, name)), None)
    if not count or string_bytes is None:
        raise EngineMissing("this engine has no web page")
    native._Z19llama_ui_get_assetsv.restype = ctypes.c_void_p
    first = native._Z19llama_ui_get_assetsv()
    for index in range(count):
        at = first + index * (3 * string_bytes + 16)
        name, tag = text(at, string_bytes), text(at + string_bytes + 16, string_bytes)
        data, size = (ctypes.c_size_t * 2).from_address(at + string_bytes)
        content = ctypes.string_at(data, size)
        if tag.strip('"') != hashlib.sha256(content).hexdigest():
            raise EngineMissing("the web page of this engine cannot be read")
        yield name, content


def _count(module: Path) -> int:
    with module.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        found = _COUNT.search(binary)
        return int(found[1]) if found else 0


def text(at: int, string_bytes: int) -> str:
    """Of the std::string at that address."""
    raw = ctypes.string_at(at, string_bytes)
    if string_bytes == _INLINE and raw[-1] < 0x80:
        return raw[: raw[-1]].decode()
    return ctypes.string_at(int.from_bytes(raw[:8], "little")).decode()


if __name__ == "__main__":
    main()
