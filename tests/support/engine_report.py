"""What the engine itself says that a model takes: its log's buffer sizes, from a child that loads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
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
sys.stderr.flush()
os._exit(0)
"""


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
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(asked)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )
    log = child.stdout + child.stderr
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
