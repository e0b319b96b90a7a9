"""Child: which devices, CPU features and libraries the engine has on this machine.

Reads one JSON line `{"libraries": {backend: path}}`, writes one. With
`"selftest": true` it checks the arithmetic of what it loaded first.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.errors import MeshError


def main() -> None:
    request = json.loads(sys.stdin.readline())
    try:
        libraries = {name: Path(path) for name, path in request["libraries"].items()}
        engine = Engine.load(libraries)
        if request.get("selftest") and "mesh" in libraries:
            MeshLibrary(libraries["mesh"]).selftest()
        answer: dict[str, object] = {
            "devices": [dataclasses.asdict(device) for device in engine.devices()],
            "cpu_features": engine.cpu_features(),
        }
    except (MeshError, OSError) as error:
        hint = error.hint if isinstance(error, MeshError) else None
        answer = {"error": str(error), "hint": hint}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
