"""The engine wheel driven by hand in a process of its own: what a node has to answer, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CHILD = """
import json, os, sys
from pathlib import Path
from mesh_llm.engine.library import Engine
asked = json.loads(sys.argv[1])
ours = os.dup(1)
os.dup2(2, 1)
Engine.load({name: Path(path) for name, path in asked["libraries"].items()})
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = asked["model"]
params.n_ctx = asked["context"]
params.n_parallel = 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
params.n_gpu_layers = 0
params.fit_params = False
params.port = 0
server = xllamacpp.Server(params)
answers = []
for kind, body in asked["requests"]:
    handle = server.handle_chat_completions if kind == "chat" else server.handle_completions
    answers.append(handle(body))
os.write(ours, json.dumps(answers).encode())
os._exit(0)
"""


def direct_answers(
    model: Path, libraries: dict[str, Path], requests: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What the engine answers without a node: one thread, one slot of 2048 tokens."""
    asked = {
        "model": str(model),
        "libraries": {name: str(path) for name, path in libraries.items()},
        "context": 2048,
        "threads": 1,
        "requests": requests,
    }
    child = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, json.dumps(asked)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode(errors="replace")[-2000:]
    answers = json.loads(child.stdout)
    assert isinstance(answers, list)
    return answers
