"""`python -m tests.support.stand_ins BYTES,BYTES ...`: `mesh-llm ...` where there are GPUs of these sizes.

The CPU computes for them, in a worker child for each: texts are those of the CPU. The name of an op among
the sizes is one that they do not know.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.cli.entry import main
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.kernel_speed import measured_kernels
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.engine.speed import measured_speed
from mesh_llm.host.worker_launch import worker_spec
from mesh_llm.local import hardware
from mesh_llm.node import node
from mesh_llm.types import Kernel, KernelSpeed, Speed

COMMAND = (sys.executable, "-W", "error", "-m", "tests.support.stand_ins")


def install(sizes: list[int], lacks: str | None) -> None:
    gpus = [
        {
            "name": f"GPU{index}",
            "description": "stand-in",
            "kind": "gpu",
            "free_bytes": size,
            "total_bytes": size,
        }
        for index, size in enumerate(sizes)
    ]

    async def described(libraries: dict[str, Path]) -> dict[str, Any]:
        found = await describe(libraries)
        return {**found, "devices": [*found["devices"], *gpus]}

    async def measured(libraries: dict[str, Path], device: str, threads: int, *, cache: Path) -> Speed | None:
        return await measured_speed(libraries, "CPU", threads, cache=cache)

    async def measured_with(
        libraries: dict[str, Path], device: str, threads: int, kernels: Sequence[Kernel], *, cache: Path
    ) -> tuple[KernelSpeed, ...]:
        return await measured_kernels(libraries, "CPU", threads, kernels, cache=cache)

    def on_the_cpu(*arguments: Any, **options: Any) -> WorkerSpec:
        return replace(worker_spec(*arguments, **options), device="CPU", lacks=lacks)

    vars(hardware).update(describe=described, measured_speed=measured, measured_kernels=measured_with)
    vars(node).update(worker_spec=on_the_cpu)


if __name__ == "__main__":
    words = sys.argv.pop(1).split(",")
    install([int(word) for word in words if word.isdigit()], next(filter(str.isalpha, words), None))
    main()
