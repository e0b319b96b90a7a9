"""Program: CPU time that the engine takes for a prompt and for decoding, with these native libraries.

Reads one JSON line from stdin (`libraries`, `model`, `prompt_tokens`, `tokens`), writes one: tokens for each
second of CPU time. One thread: what others do on the machine then counts least.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from mesh_llm.engine.library import Engine


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    report = os.dup(1)
    os.dup2(2, 1)
    Engine.load({name: Path(path) for name, path in asked["libraries"].items()})
    import xllamacpp  # after the libraries: importing it fixes the list of devices

    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = 0
    params.fit_params = False
    params.port = 0
    server = xllamacpp.Server(params)
    _ask(server, 16, 4)  # the first request touches the weights
    prompt_s = _ask(server, asked["prompt_tokens"], 1)
    decode_s = _ask(server, 16, asked["tokens"])
    figures = {"prompt": asked["prompt_tokens"] / prompt_s, "decode": asked["tokens"] / decode_s}
    os.write(report, json.dumps(figures).encode() + b"\n")
    os._exit(0)


def _ask(server: Any, prompt_tokens: int, tokens: int) -> float:
    """Seconds of CPU time, of all threads."""
    started = time.process_time()
    server.handle_completions(
        {
            "prompt": [300 + number % 4000 for number in range(prompt_tokens)],
            "n_predict": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    return time.process_time() - started


if __name__ == "__main__":
    main()
