"""Program: the engine child over workers of stock ggml-rpc, as llama.cpp itself would use them.

Reads one JSON line from stdin: `spec` (an `EngineSpec`), `endpoints` and, for
each, its `layers`. Speaks and ends as `mesh_llm.engine.children.serve` does.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from mesh_llm.engine.children.serve import load_guarded, parameters, separate_stdout, serve_until_stopped
from mesh_llm.engine.library import Engine
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import MeshError


def main() -> None:
    report = separate_stdout()
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    serve_until_stopped(lambda: start(request), report)


def start(request: dict[str, Any]) -> Any:
    spec = EngineSpec.from_line(json.dumps(request["spec"]))
    engine, _ = load_guarded(spec.library_paths())
    for endpoint in request["endpoints"]:
        add_server(engine, endpoint)
    import xllamacpp  # after the servers: importing it fixes the list of devices

    params = parameters(xllamacpp, spec, engine.devices(), directed=False)
    shares = [float(layers) for layers in request["layers"]]
    # The output head counts as one more layer, of the last device, where llama.cpp leaves it.
    shares[-1] += 1
    params.n_gpu_layers = int(sum(shares))
    length = len(params.tensor_split)
    params.tensor_split = (shares + [0.0] * length)[:length]
    # As in ours: states that are saved would cross the links.
    params.cache_ram_mib = 0
    params.n_ctx_checkpoints = 0
    return xllamacpp.Server(params)


def add_server(engine: Engine, endpoint: str) -> None:
    native = engine.native
    add = native.ggml_backend_reg_get_proc_address(
        native.ggml_backend_reg_by_name(b"RPC"), b"ggml_backend_rpc_add_server"
    )
    registry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(endpoint.encode())
    if not registry:
        raise MeshError(f"the worker at {endpoint} has no device")
    native.ggml_backend_register.argtypes = [ctypes.c_void_p]
    native.ggml_backend_register(registry)


if __name__ == "__main__":
    main()
