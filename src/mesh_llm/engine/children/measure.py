"""Child: how fast a device of this machine is.

Reads one JSON line `{"libraries": {backend: path}, "device", "threads", "memory_bytes"}`, writes one:
a `Measurement`, or `{"error"}`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
from pathlib import Path

from mesh_llm.defaults import CHILD_STOP_GRACE_S, MEASURE_TIMEOUT_S
from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.errors import MeshError


def main() -> None:
    # A driver may hang, and the node be gone by then: the kernel ends this process all the same.
    signal.alarm(math.ceil(MEASURE_TIMEOUT_S + CHILD_STOP_GRACE_S))
    request = json.loads(sys.stdin.readline())
    try:
        libraries = {name: Path(path) for name, path in request["libraries"].items()}
        Engine.load(libraries)
        measured = MeshLibrary(libraries["mesh"]).measure(
            request["device"], threads=request["threads"], memory_bytes=request["memory_bytes"]
        )
        answer: dict[str, object] = dataclasses.asdict(measured)
    except (MeshError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
