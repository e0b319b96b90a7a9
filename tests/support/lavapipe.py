"""Vulkan without a GPU: Mesa's lavapipe computes on the CPU.

`python -m tests.support.lavapipe` compiles libggml-vulkan as `mesh-llm engine build --vulkan` does, but does
not test it: on a CPU that takes longer than a library has for it. A quarter of an hour of two cores. It needs
Debian's mesa-vulkan-drivers, glslc, libvulkan-dev and spirv-headers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_llm.engine import build, gpus
from mesh_llm.engine.build import Library
from mesh_llm.engine.gpus import Gpu

_DRIVERS = Path("/usr/share/vulkan/icd.d")


def driver() -> Path | None:
    """The file by which Vulkan's loader finds lavapipe."""
    return next(iter(sorted(_DRIVERS.glob("lvp_icd*.json"))), None)


def environment(driver: Path) -> dict[str, str]:
    """No other driver, and the backend takes a device that is no GPU."""
    return {"VK_ICD_FILENAMES": str(driver), "VK_DRIVER_FILES": str(driver), "GGML_VK_VISIBLE_DEVICES": "0"}


@contextmanager
def shown() -> Iterator[None]:
    """As though the kernel showed it."""
    found = gpus.found
    vars(gpus)["found"] = lambda: (Gpu(name="lavapipe", kinds=("vulkan",)),)
    try:
        yield
    finally:
        vars(gpus)["found"] = found


def library() -> Library:
    with shown():
        return build.library("vulkan")


async def _untested(*arguments: object) -> None:
    """In the place of the self-test."""


def main() -> None:
    if (found := driver()) is None:
        raise SystemExit("there is no lavapipe on this machine: apt install mesa-vulkan-drivers")
    os.environ.update(environment(found))
    vars(build)["_flaw"] = _untested
    with shown():
        built = asyncio.run(build.ensure(("mesh", "vulkan"), lambda step: None, retry=True))
    for name, error in built.missing.items():
        raise SystemExit(f"{name}: {error.message} ({error.hint})")
    print(built.libraries["vulkan"])


if __name__ == "__main__":
    main()
