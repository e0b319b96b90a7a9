"""Child program: engines alone and over workers, each in a fork of a process that has loaded the engine.

`make test` tries every architecture, and starting Python and the engine anew for each would take minutes.
What runs is the product's own code (`engine/children`), only that it is forked. One JSON line in, one out:

- `{"kind": "names"}`: the architectures that the engine lists;
- `{"kind": "shapes", "path"}`: the tensors that the engine's loader wants for the metadata in this file;
- `{"kind": "answer", "spec", "workers", "requests", …}`: what an engine answers.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mesh_llm.engine.children import serve
from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.engine.spec import EngineSpec, LinkSpec
from mesh_llm.errors import EngineFailed

Job = dict[str, Any]

JOB_S = 100.0
"""For one job: minutes of what any of them takes on a busy machine."""
_QUOTA = 4 << 30


def main() -> None:
    libraries = {name: Path(path) for name, path in json.loads(sys.stdin.readline()).items()}
    engine = Engine.load({}, overriding=libraries.get("mesh"))
    for path in libraries.values():
        ctypes.CDLL(str(path))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_in_a_fork(engine, libraries, json.loads(line))), flush=True)


def _in_a_fork(engine: Engine, libraries: dict[str, Path], job: Job) -> Job:
    """Do a job in a process of its own, which may crash; all that it started ends with it."""
    lifeline, held = os.pipe()
    reading, writing = os.pipe()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for source, target in ((lifeline, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(held)
        os.close(reading)
        _child(engine, libraries, job, writing)
    for descriptor in (lifeline, writing, log):
        os.close(descriptor)
    try:
        return _result(reading, pid)
    finally:
        os.close(held)
        os.close(reading)


def _result(reading: int, pid: int) -> Job:
    text, end = b"", time.monotonic() + JOB_S
    while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        text += piece
    late = time.monotonic() >= end
    with suppress(ProcessLookupError, PermissionError):  # it had no time to make its group, or is gone
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text:
        result: Job = json.loads(text)
        return result
    return {"failure": "no answer in time" if late else f"ended with {status}"}


def _child(engine: Engine, libraries: dict[str, Path], job: Job, writing: int) -> NoReturn:
    try:
        kinds: dict[str, Callable[[], Job]] = {
            "names": lambda: _names(engine),
            "shapes": lambda: _shapes(engine, job["path"]),
            "answer": lambda: _answer(libraries, job),
        }
        result = kinds[job["kind"]]()
    except Exception as error:
        traceback.print_exc()
        result = {"failure": str(error)}
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(writing, data) :]
    os._exit(0)


# -- what the engine knows -------------------------------------------------------------------------


def _names(engine: Engine) -> Job:
    native = engine.native
    architecture = native["_Z13llm_arch_name8llm_arch"]
    architecture.restype, architecture.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names: list[str] = []
    while (name := architecture(len(names)).decode()) != "(unknown)":
        names.append(name)
    return {"architectures": names}


_SET_TENSOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Params(ctypes.Structure):
    """A struct that is passed in memory, with room to spare: the engine reads and writes what it knows."""

    _fields_ = (("bytes", ctypes.c_byte * 512),)


class _GgufInit(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Tensor(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _shapes(engine: Engine, path: str) -> Job:
    """Names and lengths, the innermost first, of the tensors that the loader makes for this metadata."""
    native = engine.native
    native.gguf_init_from_file.restype = ctypes.c_void_p
    native.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufInit]
    native.llama_model_default_params.restype = _Params
    native.llama_model_init_from_user.restype = ctypes.c_void_p
    native.llama_model_init_from_user.argtypes = [ctypes.c_void_p, _SET_TENSOR, ctypes.c_void_p, _Params]
    native.ggml_get_name.restype, native.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    shapes: dict[str, list[int]] = {}

    def note(tensor: int, _: object) -> None:
        lengths = list(_Tensor.from_address(tensor).ne)
        while len(lengths) > 1 and lengths[-1] == 1:
            lengths.pop()
        shapes[native.ggml_get_name(tensor).decode()] = lengths

    metadata = native.gguf_init_from_file(path.encode(), _GgufInit(True, None))
    if not metadata:
        return {"failure": f"{path} is no GGUF"}
    native.llama_model_init_from_user(metadata, _SET_TENSOR(note), None, native.llama_model_default_params())
    return {"shapes": shapes} if shapes else {"failure": "the engine's loader refused the metadata"}


# -- what an engine answers ------------------------------------------------------------------------


def _answer(libraries: dict[str, Path], job: Job) -> Job:
    spec = EngineSpec.from_line(json.dumps(job["spec"]))
    links = _start_workers(libraries, spec, job)
    events: list[Job] = []
    try:
        server = serve.start(replace(spec, links=links), events.append)
    except EngineFailed as error:
        return {"failure": next(iter(_lost(events)), str(error))}
    address = server.listening_address.removeprefix("http://")
    answers = []
    for request in job["requests"]:
        if spec.trace is not None:
            _mark(spec.trace)
        answers.append(_ask(address, spec.key, request))
    failed = _lost(events)
    declined = [op for event in events if event["event"] == "declined" for op in event["ops"]]
    return {"answers": answers, "declined": declined, **({"failure": failed[0]} if failed else {})}


def _lost(events: list[Job]) -> list[str]:
    return [event["cause"] for event in events if event["event"] == "link_failed"]


def _mark(trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write('{"frame": "request"}\n')


def _ask(address: str, key: str, request: Job) -> Job:
    connection = http.client.HTTPConnection(address, timeout=JOB_S)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", request["path"], json.dumps(request["body"]), headers)
    reply = connection.getresponse()
    return {"status": reply.status, "body": json.loads(reply.read())}


def _start_workers(libraries: dict[str, Path], spec: EngineSpec, job: Job) -> tuple[LinkSpec, ...]:
    """One process for each, forked here; each is linked to the engine and to its neighbours."""
    layers: list[int] = job["workers"]
    count = len(layers)
    ends = [socket.socketpair() for _ in range(count)]
    between = [socket.socketpair() for _ in range(count - 1)]
    for index in range(count):
        if os.fork() == 0:
            peers = {}
            if index > 0:
                peers[index - 1] = between[index - 1][1]
            if index < count - 1:
                peers[index + 1] = between[index][0]
            _work(libraries, spec, ends, between, ends[index][1], peers, job)
    for pair in between:
        pair[0].close()
        pair[1].close()
    for pair in ends:
        pair[1].close()
    return tuple(
        LinkSpec(
            name=f"MESH{index}",
            fd=ends[index][0].detach(),
            layers=layers[index],
            next_number=index + 1 if index < count - 1 else None,
        )
        for index in range(count)
    )


def _work(
    libraries: dict[str, Path],
    spec: EngineSpec,
    ends: list[tuple[socket.socket, socket.socket]],
    between: list[tuple[socket.socket, socket.socket]],
    link: socket.socket,
    peers: dict[int, socket.socket],
    job: Job,
) -> NoReturn:
    try:
        mine = {link.fileno(), *(peer.fileno() for peer in peers.values())}
        for pair in (*ends, *between):
            for end in pair:
                if end.fileno() not in mine:
                    end.close()
        engine = Engine.load({})
        for backend in ("mesh", "cpu"):
            if backend in libraries:
                engine.load_backend(backend, libraries[backend])
        worker = MeshLibrary(libraries["mesh"]).new_worker("CPU", threads=spec.threads, quota_bytes=_QUOTA)
        if job["poison"]:
            worker.poison()
        if job["lacks"]:
            worker.lack(job["lacks"])
        if job["in_main_memory"]:
            worker.use_main_memory(job["in_main_memory"], None, _QUOTA)
        worker.add_model(spec.fingerprint, spec.files)
        for adapter in spec.adapters:
            worker.add_model(adapter.digest, [adapter.path])
        for number, peer in peers.items():
            worker.add_peer(number, peer.detach())
        worker.serve(link.detach())
    except Exception:
        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main()
