"""Program: one worker of stock ggml-rpc, with the wheel, the CPU library and the threads that ours have.

Reads one JSON line from stdin (`libraries`, `threads`, `device`); stdin stays open as its
lifeline. Prints one JSON line with the port that it is about to listen on.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from pathlib import Path
from typing import Any

from mesh_llm.engine.children.serve import load_guarded, separate_stdout
from mesh_llm.engine.library import Engine


def main() -> None:
    report = separate_stdout()
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    engine, _ = load_guarded({name: Path(path) for name, path in request["libraries"].items()})
    port = _free_port()
    report({"event": "listening", "port": port})
    serve(engine, f"127.0.0.1:{port}", request["threads"], request["device"])


def serve(engine: Engine, endpoint: str, threads: int, name: str) -> None:
    """Blocks, and serves one client after the other."""
    native = engine.native
    index = next(i for i, device in enumerate(engine.devices()) if device.name == name)
    devices = (ctypes.c_void_p * 1)(native.ggml_backend_dev_get(index))
    start = native.ggml_backend_reg_get_proc_address(
        native.ggml_backend_reg_by_name(b"RPC"), b"ggml_backend_rpc_start_server"
    )
    prototype = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    )
    # Without a folder for its cache of weights: with one it would skip tensors beyond 10 MiB, of which the
    # default model has none in its layers.
    prototype(start)(endpoint.encode(), None, threads, 1, devices)


def _free_port() -> int:
    # It takes a number and no socket; between here and there nobody else on loopback asks for this one.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
