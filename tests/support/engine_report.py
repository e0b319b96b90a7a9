"""What the engine itself says that a model takes: its log's buffer sizes, from a child that loads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_TIMEOUT_S = 60.0
_LINE = re.compile(r"(model|KV|RS|compute|output) buffer size *= *([0-9.]+) MiB")

_CHILD = """
import json, os, sys
import xllamacpp
asked = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = asked["model"]
params.n_ctx = asked["context"] * asked["slots"]
params.n_parallel = asked["slots"]
params.kv_unified = params.fit_params = params.warmup = False
params.n_gpu_layers = 0
params.cpuparams.n_threads = 1
params.verbosity = 4
params.port = 0
params.hostnames = ["127.0.0.1"]
types = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
params.cache_type_k = xllamacpp.ggml_type(types[asked["type_k"]])
params.cache_type_v = xllamacpp.ggml_type(types[asked["type_v"]])
if not asked["flash_attention"]:
    params.flash_attn_type = 0
server = xllamacpp.Server(params)
sys.stdin.read()
os._exit(0)
"""
_LAST = "listening on"
"""Of what it logs about the model. A thread writes it: when the child ends, some of it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Bytes, each known to a hundredth of a MiB per line of the log."""

    weight_bytes: int
    cache_bytes: int
    compute_bytes: int
    weight_lines: int
    cache_lines: int
    log: str

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


def engine_report(
    model: Path,
    *,
    context: int,
    slots: int,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attention: bool = True,
) -> EngineReport:
    asked = {
        "model": str(model),
        "context": context,
        "slots": slots,
        "type_k": type_k,
        "type_v": type_v,
        "flash_attention": flash_attention,
    }
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(asked)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with child, bounded(child):
        assert child.stdout is not None
        lines: list[str] = []
        while not (lines and _LAST in lines[-1]) and (line := child.stdout.readline()):
            lines.append(line)
        child.communicate()
    log = "".join(lines)
    if child.returncode != 0:
        raise AssertionError(f"the engine did not load {model.name}:\n{log[-2000:]}")
    sizes: dict[str, list[float]] = {"model": [], "KV": [], "RS": [], "compute": [], "output": []}
    for what, mib in _LINE.findall(log):
        sizes[what].append(float(mib) * _MIB)
    cache = sizes["KV"] + sizes["RS"]
    return EngineReport(
        weight_bytes=round(sum(sizes["model"])),
        cache_bytes=round(sum(cache)),
        compute_bytes=round(sum(sizes["compute"]) + sum(sizes["output"])),
        weight_lines=len(sizes["model"]),
        cache_lines=len(cache),
        log=log,
    )


@contextmanager
def bounded(child: subprocess.Popen[str]) -> Iterator[None]:
    """A child that hangs is ended."""
    timer = threading.Timer(_TIMEOUT_S, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
