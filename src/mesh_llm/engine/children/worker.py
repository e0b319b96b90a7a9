"""Child: lends a device of this machine to engines elsewhere.

1. reads one JSON line from stdin (`WorkerSpec`); stdin stays open as its lifeline;
2. loads the engine and its native libraries, and knows the models it was told of;
3. listens on a unix socket of the node's: each connection makes one request, a
   line of JSON. `session` and `peer` come with a descriptor, an engine's link or
   another worker's, which `drop` closes again; `model` names a model's files, and which tensors of it
   are there where that is not all of them; `prepare` reads layers of it
   into memory and tells how far it is, line by line; `unload` drops it; `beat` asks whether it lives;
4. prints JSON lines: `ready`, and `ended` with the reason for each session.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_llm.defaults import WORKER_HAND_OVER_S
from mesh_llm.engine.children.serve import Report, load_guarded, separate_stdout
from mesh_llm.engine.library import WorkerHandle
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import EngineFailed, MeshError

_REQUEST_BYTES = 1 << 20
"""Of one request: the paths of a model in a hundred files fit, and the names of ten thousand tensors."""

_ACCEPT_AGAIN_S = 0.2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = separate_stdout()
    spec = WorkerSpec.from_line(sys.stdin.readline())
    try:
        worker = _open(spec)
        listener = _listen(Path(spec.socket))
    except (MeshError, OSError) as error:
        report({"event": "failed", "cause": str(error)})
        os._exit(1)
    report({"event": "ready", "pid": os.getpid()})
    desk = _Desk(worker, report)
    while True:
        desk.take(_accepted(listener))


def _open(spec: WorkerSpec) -> WorkerHandle:
    _, mesh = load_guarded({name: Path(path) for name, path in spec.libraries.items()})
    if mesh is None:
        raise EngineFailed("libggml-mesh is not built on this machine", hint="mesh-llm engine build")
    if spec.trace is not None:
        mesh.trace(spec.trace)
    worker = mesh.new_worker(spec.device, threads=spec.threads, quota_bytes=spec.quota_bytes)
    if spec.poison:
        worker.poison()
    if spec.lacks is not None:
        worker.lack(spec.lacks)
    if spec.main_memory is not None:
        kept = spec.main_memory
        worker.use_main_memory(kept.pattern, kept.layers, kept.quota_bytes)
    for fingerprint, files in spec.models.items():
        worker.add_model(fingerprint, files)
    return worker


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    listener.listen()
    return listener


def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        try:
            return listener.accept()[0]
        except OSError:
            # Out of descriptors: some are free again once a link has ended.
            time.sleep(_ACCEPT_AGAIN_S)


class _Desk:
    """Takes the node's requests. Those that last get a thread of their own."""

    def __init__(self, worker: WorkerHandle, report: Report) -> None:
        self._worker = worker
        self._report = report

    def take(self, connection: socket.socket) -> None:
        try:
            request, descriptors = _read_request(connection)
        except (OSError, ValueError):
            connection.close()  # whoever asked has gone, or asked for nothing
            return
        try:
            self._begin(connection, request, descriptors)
        except MeshError:
            connection.close()  # the worker owns the link, and has no thread for it
        except RuntimeError:
            # No thread can be started.
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)

    def _begin(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        match request.get("kind"), descriptors:
            case "session", [descriptor]:
                _start(lambda: self._report({"event": "ended", "fault": self._worker.serve(descriptor)}))
                _end(connection, {"done": True})
            case "peer", [descriptor]:
                self._worker.add_peer(request["number"], descriptor)
                _end(connection, {"done": True})
            case "beat", []:
                _end(connection, {"done": True})
            case "drop", []:
                self._worker.drop_peer(request["number"])
                _end(connection, {"done": True})
            case "model" | "prepare" | "unload", []:
                _start(lambda: self._answer(connection, request))
            case _:
                connection.close()
                for descriptor in descriptors:
                    os.close(descriptor)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        fingerprint = request["fingerprint"]
        try:
            match request["kind"]:
                case "model" if "tensors" in request:
                    self._worker.add_part(fingerprint, request["files"], request["tensors"])
                case "model":
                    self._worker.add_model(fingerprint, request["files"])
                case "prepare":
                    first, last = request["layers"]
                    self._worker.prepare(
                        fingerprint, first, last, lambda *sizes: _progress(connection, *sizes)
                    )
                case "unload":
                    self._worker.unload(fingerprint)
            _end(connection, {"done": True, "resident_bytes": self._worker.resident_bytes()})
        except MeshError as error:
            _end(connection, {"fault": error.message})


def _read_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One line, and the descriptor that came with it."""
    connection.settimeout(WORKER_HAND_OVER_S)
    message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
    while not message.endswith(b"\n"):
        more = connection.recv(_REQUEST_BYTES)
        if not more or len(message) > _REQUEST_BYTES:
            raise ValueError("a request is too long")
        message += more
    connection.settimeout(None)
    request: dict[str, Any] = json.loads(message)
    return request, descriptors


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _progress(connection: socket.socket, done: int, total: int) -> None:
    with suppress(OSError):  # whoever asked has gone; the work goes on
        connection.sendall(json.dumps({"done_bytes": done, "total_bytes": total}).encode() + b"\n")


def _end(connection: socket.socket, answer: dict[str, Any]) -> None:
    with connection, suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
