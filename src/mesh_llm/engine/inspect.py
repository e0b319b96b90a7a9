"""Ask the short-lived children: what a model file holds, what this machine's engine can do, how fast."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_llm.defaults import INSPECT_TIMEOUT_S, MEASURE_TIMEOUT_S
from mesh_llm.engine.library import Measurement
from mesh_llm.engine.process import Finished, module, run
from mesh_llm.errors import EngineFailed, ModelError
from mesh_llm.types import Speed


async def read_gguf(path: Path) -> dict[str, Any]:
    """The metadata and tensor table of a model, as `engine/gguf.py` prints them."""
    check_readable(path)
    finished = await _ask("mesh_llm.engine.gguf", {"path": str(path.resolve())})
    answer = _answer(finished)
    if answer is None:
        raise ModelError(
            f"{path} cannot be read as GGUF: the parser ended with status {finished.status}"
            f"{_last_words(finished)}",
            hint="download it again; the file is damaged",
        )
    if "error" in answer:
        raise ModelError(answer["error"], hint=answer["hint"])
    return answer


def check_readable(path: Path) -> None:
    """Say what is wrong with a path before anything is started for it."""
    elsewhere = "mesh-llm --model takes the path of a .gguf file, or a name such as smollm2"
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise ModelError(f"{path} is a folder, not a GGUF file", hint=elsewhere)
        if not stat.S_ISREG(kind):
            # Opening a pipe would wait for somebody to write to it.
            raise ModelError(f"{path} is not a regular file", hint=elsewhere)
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}", hint=elsewhere) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=f"chmod +r {path}") from error
    if not magic:
        raise ModelError(f"{path} is empty", hint="download it again")
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file",
            hint="llama.cpp runs GGUF files; look for one on the model's page",
        )


async def describe(libraries: dict[str, Path]) -> dict[str, Any]:
    """Devices and CPU features with these native libraries loaded."""
    request = {"libraries": {name: str(path) for name, path in libraries.items()}}
    finished = await _ask("mesh_llm.engine.describe", request)
    answer = _answer(finished)
    if answer is None:
        raise EngineFailed(
            f"the engine does not run on this machine: status {finished.status}{_last_words(finished)}",
            hint="mesh-llm engine build --force builds its libraries again",
        )
    if "error" in answer:
        raise EngineFailed(answer["error"], hint=answer["hint"])
    return answer


async def measure(
    libraries: Mapping[str, Path], device: str, *, threads: int, memory_bytes: int
) -> Measurement:
    """What a device can do with these native libraries, libggml-mesh among them."""
    request = {
        "libraries": {name: str(path) for name, path in libraries.items()},
        "device": device,
        "threads": threads,
        "memory_bytes": memory_bytes,
    }
    finished = await _ask("mesh_llm.engine.measure", request, timeout_s=MEASURE_TIMEOUT_S)
    answer = _answer(finished)
    if answer is None:
        raise EngineFailed(f"it ended with status {finished.status}{_last_words(finished)}")
    if "error" in answer:
        raise EngineFailed(answer["error"])
    return Measurement(speed=Speed(**answer["speed"]), disturbed=answer["disturbed"])


async def _ask(name: str, request: dict[str, Any], timeout_s: float = INSPECT_TIMEOUT_S) -> Finished:
    return await run(module(name), stdin=json.dumps(request).encode() + b"\n", timeout_s=timeout_s)


def _answer(finished: Finished) -> dict[str, Any] | None:
    """The last line, if it is JSON; native code may have printed before it."""
    if finished.status != 0 or not finished.output:
        return None
    try:
        answer = json.loads(finished.output[-1])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _last_words(finished: Finished) -> str:
    return f" ({finished.errors[-1].strip()})" if finished.errors else ""
