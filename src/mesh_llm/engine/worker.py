"""Child: lends a device of this machine to engines elsewhere.

1. reads one JSON line from stdin (`WorkerSpec`); stdin stays open as its lifeline;
2. loads the engine and its native libraries, and knows the models it was told of;
3. listens on a unix socket of the node's: each connection hands over one
   descriptor, either a session (an engine's link) or a peer (another worker's);
4. prints JSON lines: `ready`, and `ended` with the reason for each session.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from mesh_llm.engine.library import WorkerHandle
from mesh_llm.engine.serve import Report, load_guarded, separate_stdout
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import EngineFailed, MeshError


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
    while True:
        connection, _ = listener.accept()
        with connection:
            _take_over(connection, worker, report)


def _open(spec: WorkerSpec) -> WorkerHandle:
    _, mesh = load_guarded({name: Path(path) for name, path in spec.libraries.items()})
    if mesh is None:
        raise EngineFailed("there is no libggml-mesh on this machine", hint="mesh-llm engine build")
    worker = mesh.new_worker(spec.device, threads=spec.threads, quota_bytes=spec.quota_bytes)
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


def _take_over(connection: socket.socket, worker: WorkerHandle, report: Report) -> None:
    """One descriptor with a line that says what it is."""
    message, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    if len(descriptors) != 1:
        return
    request = json.loads(message)
    if request["kind"] == "peer":
        worker.add_peer(request["number"], descriptors[0])
    else:
        threading.Thread(
            target=lambda: report({"event": "ended", "fault": worker.serve(descriptors[0])}),
            name="session",
            daemon=True,
        ).start()
    connection.sendall(b"ok\n")


if __name__ == "__main__":
    main()
