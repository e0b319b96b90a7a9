"""What a node was asked to do: options, checked against each other before anything starts."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from mesh_llm.defaults import (
    API_LISTEN,
    API_PORT,
    CONTEXT_LIMIT,
    DEFAULT_MODEL,
    DEFAULT_SLOTS,
    SLOTS_LIMIT,
    THREADS_LIMIT,
)
from mesh_llm.errors import UsageError
from mesh_llm.types import Setting

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)B?$", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    home: Path
    model: str = DEFAULT_MODEL
    alias: str | None = None
    name: str = ""
    listen: str = API_LISTEN
    port: int = API_PORT
    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    context: int | None = None
    """Tokens per slot; None takes the largest that fits, up to what the model was trained on."""
    slots: int = DEFAULT_SLOTS
    max_memory_bytes: int | None = None
    devices: tuple[str, ...] | None = None
    """None: every GPU that the engine has, else the CPU. ("none",) and ("CPU",): the CPU."""
    gpu_layers: int | None = None
    threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    embeddings: bool = False
    rerank: bool = False
    mmproj: Path | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    bin_dir: Path | None = None
    trace: Path | None = None
    """Gets a line for each frame on links to other machines."""

    def __post_init__(self) -> None:
        _check_range("--ctx-size", self.context, 1, CONTEXT_LIMIT)
        _check_range("--parallel", self.slots, 1, SLOTS_LIMIT)
        _check_range("--threads", self.threads, 1, THREADS_LIMIT)
        _check_range("--port", self.port, 0, 65535)
        _check_range("--gpu-layers", self.gpu_layers, 0, 10_000)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("--api-key is empty")
        if not _is_loopback(self.listen) and self.api_key is None:
            raise UsageError(
                f"--listen {self.listen} opens the API to the network, and there is no --api-key",
                hint="set MESH_LLM_API_KEY, or listen on 127.0.0.1",
            )
        if self.settings and self.bin_dir is not None:
            raise UsageError(
                "--engine-set speaks to the bundled engine and cannot be used with --bin-dir",
                hint="leave one of them out",
            )
        if self.trace is not None and self.bin_dir is not None:
            raise UsageError(
                "--trace shows what the bundled engine says to workers, and --bin-dir brings another one",
                hint="leave one of them out",
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise UsageError(f"--trace {self.trace}: there is no folder {self.trace.absolute().parent}")
        if self.mmproj is not None and not self.mmproj.is_file():
            raise UsageError(f"--mmproj {self.mmproj}: there is no such file")


def _check_range(option: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{option} {value} makes no sense: between {least} and {most:,}")


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_size(text: str) -> int:
    """`8GB`, `500MB`, `1.5g` or plain bytes."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="for example 8GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
