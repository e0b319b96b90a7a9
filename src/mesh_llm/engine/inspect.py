"""Ask the short-lived children: what a model file holds, what this machine's engine can do, how fast."""

from __future__ import annotations

import asyncio
import json
import stat
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mesh_llm.defaults import INSPECT_AT_ONCE, INSPECT_LINE_BYTES, INSPECT_TIMEOUT_S, MEASURE_TIMEOUT_S
from mesh_llm.engine.gpus import KINDS
from mesh_llm.engine.library import KernelMeasurement, Measurement
from mesh_llm.engine.process import Finished, module, run, spawn
from mesh_llm.errors import EngineFailed, ModelError
from mesh_llm.frozen import frozen
from mesh_llm.types import Kernel, KernelSpeed, Speed


async def read_gguf(path: Path) -> dict[str, Any]:
    """The metadata and tensor table of a model, and its fingerprint, as `children/gguf.py` prints them."""
    check_readable(path)
    # Not resolved: a link's target may have neither the name nor the neighbours that the model is known by.
    read = await _read([path.absolute()], fingerprint=True)
    return _document(path, read, 0)


async def read_headers(paths: Sequence[Path]) -> AsyncIterator[dict[str, Any] | ModelError]:
    """The same of many models, in their order: without fingerprints, which read more than headers.

    What is wrong with one is told of that one.
    """
    start = 0
    while start < len(paths):
        asked = paths[start : start + INSPECT_AT_ONCE]
        read = await _read(asked, fingerprint=False)
        # The child went no further than the file that it died of; the next one begins behind that.
        for index in range(min(len(asked), max(read.answers, default=-1) + 2)):
            start += 1
            try:
                yield _document(asked[index], read, index)
            except ModelError as error:
                yield error


@frozen
class _Read:
    answers: Mapping[int, dict[str, Any]]
    """By the place of their path; of all, where nothing went wrong."""
    end: str
    """Of the child."""


async def _read(paths: Sequence[Path], *, fingerprint: bool) -> _Read:
    """Ask a child, which has a minute for each answer."""
    answers: dict[int, dict[str, Any]] = {}
    said: deque[str] = deque(maxlen=1)
    clock = asyncio.get_running_loop().time
    request = {"paths": [str(path) for path in paths], "fingerprint": fingerprint}

    def take(line: str) -> None:
        # Filed by what it says, not by its turn: a line before it may have been unreadable.
        answer = _parsed(line) or {}
        index = answer.pop("index", None)
        if isinstance(index, int) and 0 <= index < len(paths):
            answers.setdefault(index, answer)
            limit.reschedule(clock() + INSPECT_TIMEOUT_S)

    end = f"it did not answer within {INSPECT_TIMEOUT_S:.0f} s"
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(INSPECT_TIMEOUT_S) as limit,
            spawn(
                module("mesh_llm.engine.children.gguf"),
                on_stdout=take,
                on_stderr=said.append,
                line_limit_bytes=INSPECT_LINE_BYTES,
            ) as child,
        ):
            await child.send(json.dumps(request).encode() + b"\n", close=True)
            end = f"the parser ended with status {await child.wait()}"
    return _Read(answers=answers, end=f"{end}{_last_words(said)}")


def _document(path: Path, read: _Read, index: int) -> dict[str, Any]:
    answer = read.answers.get(index)
    if answer is None:
        raise ModelError(
            f"{path} cannot be read as GGUF: {read.end}", hint="download it again; the file is damaged"
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


async def vocabularies_differ(model: Path, draft: Path) -> str | None:
    """Why one model cannot guess tokens for another; None where it can."""
    request = {"model": str(model.resolve()), "draft": str(draft.resolve())}
    finished = await _ask("mesh_llm.engine.children.vocabulary", request)
    answer = _answer(finished)
    if answer is None:
        raise ModelError(
            f"{draft} cannot be read as GGUF{_last_words(finished.errors)}", hint="download it again"
        )
    if "error" in answer:
        raise ModelError(answer["error"], hint=answer["hint"])
    differs: str | None = answer["differs"]
    return differs


async def describe(libraries: dict[str, Path]) -> dict[str, Any]:
    """Devices and CPU features with these native libraries loaded.

    GPUs' libraries that do not work are left out, and named with the reason in `unusable`.
    """
    request = {"libraries": {name: str(path) for name, path in libraries.items()}}
    finished = await _ask("mesh_llm.engine.children.describe", request)
    answer = _answer(finished)
    if answer is None and (of_gpus := [name for name in libraries if name in KINDS]):
        # A driver that ends processes is no reason to do without the CPU.
        rest = await describe({name: path for name, path in libraries.items() if name not in of_gpus})
        why = f"the engine ends with status {finished.status}{_last_words(finished.errors)}"
        return {**rest, "unusable": dict.fromkeys(of_gpus, why)}
    if answer is None:
        raise EngineFailed(
            f"the engine does not run on this machine: status {finished.status}"
            f"{_last_words(finished.errors)}",
            hint="mesh-llm engine build --force rebuilds its libraries",
        )
    if "error" in answer:
        raise EngineFailed(answer["error"], hint=answer["hint"])
    return answer


async def take_page(target: Path) -> None:
    """Write the engine's web page to `target`, as a zip archive."""
    finished = await _ask("mesh_llm.engine.children.page", {"target": str(target)})
    answer = _answer(finished)
    if answer is None:
        raise EngineFailed(f"the engine does not give its web page{_last_words(finished.errors)}")
    if "error" in answer:
        raise EngineFailed(answer["error"])


async def flaw(backend: str, made: Path, mesh: Path | None) -> str | None:
    """What is wrong with a library, found by using it in a process that may die of it."""
    libraries = {backend: str(made)}
    if mesh is not None:
        libraries.setdefault("mesh", str(mesh))
    finished = await _ask("mesh_llm.engine.children.describe", {"libraries": libraries, "selftest": backend})
    if finished.status != 0:
        return f"it ended with status {finished.status}"
    answer = json.loads(finished.output[-1])
    return answer.get("error") or None


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
    finished = await _ask("mesh_llm.engine.children.measure", request, timeout_s=MEASURE_TIMEOUT_S)
    answer = _answer(finished)
    if answer is None:
        raise EngineFailed(f"it ended with status {finished.status}{_last_words(finished.errors)}")
    if "error" in answer:
        raise EngineFailed(answer["error"])
    figures = {name: figure for name, figure in answer["speed"].items() if name != "kernels"}
    return Measurement(speed=Speed(**figures), disturbed=answer["disturbed"])


async def measure_kernels(
    libraries: Mapping[str, Path], device: str, kernels: Sequence[Kernel], *, threads: int, memory_bytes: int
) -> list[KernelMeasurement]:
    """The same with what one model is made of; some may be missing."""
    request = {
        "libraries": {name: str(path) for name, path in libraries.items()},
        "device": device,
        "threads": threads,
        "memory_bytes": memory_bytes,
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    finished = await _ask("mesh_llm.engine.children.measure", request, timeout_s=MEASURE_TIMEOUT_S)
    answer = _answer(finished)
    if answer is None:
        raise EngineFailed(f"it ended with status {finished.status}{_last_words(finished.errors)}")
    if "error" in answer:
        raise EngineFailed(answer["error"])
    return [
        KernelMeasurement(
            speed=KernelSpeed(**{**each["speed"], "kernel": Kernel(**each["speed"]["kernel"])}),
            disturbed=each["disturbed"],
        )
        for each in answer["kernels"]
    ]


async def _ask(name: str, request: dict[str, Any], timeout_s: float = INSPECT_TIMEOUT_S) -> Finished:
    return await run(module(name), stdin=json.dumps(request).encode() + b"\n", timeout_s=timeout_s)


def _answer(finished: Finished) -> dict[str, Any] | None:
    """The last line, if it is JSON; native code may have printed before it."""
    if finished.status != 0 or not finished.output:
        return None
    return _parsed(finished.output[-1])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _last_words(errors: Sequence[str]) -> str:
    return f" ({errors[-1].strip()})" if errors else ""
