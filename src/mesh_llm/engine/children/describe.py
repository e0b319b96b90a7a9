"""Child: which devices, CPU features and libraries the engine has on this machine.

Reads one JSON line `{"libraries": {backend: path}}`, writes one. Of a GPU's library
that does not work, `unusable` says why, and the rest is told without it. With `"selftest": backend`
that one's arithmetic is checked first, and everything has to work.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mesh_llm.engine.gpus import KINDS
from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.errors import EngineMissing, MeshError
from mesh_llm.third_party import EngineSymbol, features_off


def main() -> None:
    request = json.loads(sys.stdin.readline())
    libraries = {name: Path(path) for name, path in request["libraries"].items()}
    try:
        answer = _tested(libraries, tested) if (tested := request.get("selftest")) else _described(libraries)
    except (MeshError, OSError) as error:
        hint = error.hint if isinstance(error, MeshError) else None
        answer = {"error": str(error), "hint": hint}
    print(json.dumps(answer))


def _tested(libraries: dict[str, Path], backend: str) -> dict[str, Any]:
    Engine.load(libraries)
    if "mesh" in libraries:
        kind = KINDS.get(backend)
        MeshLibrary(libraries["mesh"]).selftest(kind.registry if kind else None)
    return {}


def _described(libraries: dict[str, Path]) -> dict[str, Any]:
    engine = Engine.load({name: path for name, path in libraries.items() if name not in KINDS})
    unusable = {}
    for name, path in libraries.items():
        if name not in KINDS:
            continue
        try:
            _add(engine, name, path)
        except EngineMissing as error:
            unusable[name] = error.message
    return {
        "devices": [dataclasses.asdict(device) for device in engine.devices()],
        "cpu_features": engine.cpu_features(),
        "unusable": unusable,
        "features_off": features_off(_symbols(libraries)),
    }


def _symbols(libraries: dict[str, Path]) -> tuple[EngineSymbol, ...]:
    return MeshLibrary(libraries["mesh"]).engine_symbols() if "mesh" in libraries else ()


def _add(engine: Engine, name: str, path: Path) -> None:
    before = len(engine.devices())
    engine.load_backend(name, path)
    if len(engine.devices()) == before:
        raise EngineMissing("it finds no GPU that it can use")


if __name__ == "__main__":
    main()
