"""Child: how fast a device of this machine is.

Reads one JSON line `{"libraries": {backend: path}, "device", "threads", "memory_bytes"}`, writes one:
a `Measurement`, or `{"error"}`. With `"kernels"`, a list of them, it is `{"kernels"}`, a list of
`KernelMeasurement`s: of those that this device has, and that there was time for, the first ones first.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_llm.defaults import CHILD_STOP_GRACE_S, MEASURE_TIMEOUT_S
from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.errors import MeshError
from mesh_llm.types import Kernel

KERNELS_S = 4.0
"""For all kernels of a model: people wait for it, once for each model and machine."""


def main() -> None:
    # A driver may hang, and the node be gone by then: the kernel ends this process all the same.
    signal.alarm(math.ceil(MEASURE_TIMEOUT_S + CHILD_STOP_GRACE_S))
    request = json.loads(sys.stdin.readline())
    try:
        libraries = {name: Path(path) for name, path in request["libraries"].items()}
        Engine.load(libraries)
        library = MeshLibrary(libraries["mesh"])
        answer: dict[str, object] = (
            {"kernels": _kernels(library, request)} if "kernels" in request else _device(library, request)
        )
    except (MeshError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _device(library: MeshLibrary, request: dict[str, Any]) -> dict[str, object]:
    measured = library.measure(
        request["device"], threads=request["threads"], memory_bytes=request["memory_bytes"]
    )
    return dataclasses.asdict(measured)


def _kernels(library: MeshLibrary, request: dict[str, Any]) -> list[dict[str, object]]:
    found = []
    until = time.monotonic() + KERNELS_S
    for each in request["kernels"]:
        if time.monotonic() >= until:
            break
        # One that this device does not compute says nothing about the others.
        with suppress(MeshError):
            measured = library.measure_kernel(
                request["device"],
                Kernel(**each),
                threads=request["threads"],
                memory_bytes=request["memory_bytes"],
            )
            found.append(dataclasses.asdict(measured))
    return found


if __name__ == "__main__":
    main()
