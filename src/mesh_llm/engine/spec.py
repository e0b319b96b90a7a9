"""What an engine child is told: one JSON document, checked on both sides."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from mesh_llm.defaults import ENGINE_STEP_S, STATE_LIMIT_BYTES
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import EngineOptions
from mesh_llm.types import Setting

SETTINGS: dict[str, type] = {
    "n_batch": int,
    "n_ubatch": int,
    "n_keep": int,
    "n_cache_reuse": int,
    "n_threads_http": int,
    "n_ctx_checkpoints": int,
    "cache_ram_mib": int,
    "cache_prompt": bool,
    "cache_idle_slots": bool,
    "cont_batching": bool,
    "ctx_shift": bool,
    "swa_full": bool,
    "kv_unified": bool,
    "no_kv_offload": bool,
    "no_op_offload": bool,
    "no_extra_bufts": bool,
    "check_tensors": bool,
    "warmup": bool,
    "use_jinja": bool,
    "chat_template": str,
    "prefill_assistant": bool,
    "slot_prompt_similarity": float,
    "slot_save_path": str,
    "sleep_idle_seconds": int,
    "rope_freq_base": float,
    "rope_freq_scale": float,
    "yarn_ext_factor": float,
    "yarn_attn_factor": float,
    "yarn_beta_fast": float,
    "yarn_beta_slow": float,
    "yarn_orig_ctx": int,
    "image_min_tokens": int,
    "image_max_tokens": int,
    "mmproj_use_gpu": bool,
}
"""llama.cpp's own settings that --engine-set takes, by the names that the engine gives them."""


def parse_setting(text: str) -> tuple[str, Setting]:
    """`KEY=VALUE` of --engine-set."""
    key, separator, value = text.partition("=")
    if not separator or key not in SETTINGS:
        nearest = ", ".join(sorted(SETTINGS))
        raise UsageError(f"--engine-set {text}: no such setting", hint=f"KEY=VALUE with one of {nearest}")
    kind = SETTINGS[key]
    try:
        if kind is bool:
            return key, {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}[
                value.lower()
            ]
        return key, kind(value)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"--engine-set {text}: {key} takes {wanted}") from None


@frozen
class LinkSpec:
    """One worker, seen from the engine child: a socket that it inherits, and the layers behind it."""

    name: str
    fd: int
    layers: int
    next_number: int | None = None
    """By which the worker calls its own link to the next one; None where it has none, and the host relays."""
    state_bytes: int = 0
    """Of its memory, planned for saved states."""


@frozen
class DraftSpec:
    """How the engine guesses ahead, at most so many tokens at a time; 0: not in this way."""

    text_depth: int = 0
    """By what stood in the text before."""
    model: str | None = None
    """A draft model's file; it runs on the host's own devices."""
    model_depth: int = 0
    reads_layers: bool = False
    """It is an EAGLE3 head: it drafts from the inputs of some of the model's layers."""
    head_depth: int = 0
    """By the model's own layer for further tokens; without a draft model only."""
    head_layer: int = 0
    """Which one that is."""
    needs_states: bool = False
    """The model's state cannot be cut back: it is saved before each guess."""

    @property
    def depth(self) -> int:
        return max(self.text_depth, self.model_depth, self.head_depth)


@frozen
class PaceSpec:
    """Tokens in a step of the engine while others wait for their next one, each of these included."""

    usual: int
    """That many, or a multiple."""
    fewest: int
    """Where the usual number takes far too long."""
    seconds: float = ENGINE_STEP_S
    """That a step is to take."""


@frozen
class StatesSpec:
    """Which states of a split model the engine saves; each worker keeps its part."""

    checkpoints: int
    """For each slot: of what cannot be rolled back."""
    prompt_cache_mib: int = 16
    """Of texts whose slot was taken: what the host keeps of them, 12 bytes for a token and its own layers."""
    most_bytes: int = STATE_LIMIT_BYTES
    """On each worker."""


@frozen
class AdapterSpec:
    """A LoRA adapter; workers have files of their own, under the same digest."""

    path: str
    scale: float
    digest: str


@frozen
class EngineSpec(EngineOptions):
    """Everything that decides how the engine child runs."""

    model: str
    alias: str
    context: int
    """Tokens of all slots together, as llama.cpp counts."""
    slots: int
    threads: int
    key: str
    devices: tuple[str, ...] = ()
    """GPUs by name; none means the CPU alone."""
    gpu_layers: int = 0
    overrides: tuple[str, ...] = ()
    """Patterns of names: such weights lie in main memory, whatever the GPUs hold."""
    batch: int | None = None
    """Tokens of prompts between two looks at everybody's answers; None leaves it to the engine."""
    micro_batch: int | None = None
    """Of these, what is computed at once."""
    pace: PaceSpec | None = None
    """None: such a step is never shorter, whoever waits."""
    embeddings: bool = False
    rerank: bool = False
    mmproj: str | None = None
    adapters: tuple[AdapterSpec, ...] = ()
    prompt_cache_mib: int = 0
    libraries: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    bin_dir: str | None = None
    files: tuple[str, ...] = ()
    """All files of the model, for links."""
    fingerprint: str = ""
    send_weights: bool = False
    """To workers without the model's files; else they refuse."""
    head_tied: bool = False
    head_on_worker: bool = False
    """The output head with the last layers, instead of on the host."""
    draft: DraftSpec = DraftSpec()
    states: StatesSpec | None = None
    """None: a split engine saves none."""
    trace: str | None = None
    """A file that gets a line for each frame on the links."""
    stamps: dict[str, str] = field(default_factory=dict)
    """Files that it loads, as they were when they were checked (`file_stamp`)."""
    links: tuple[LinkSpec, ...] = ()
    """Workers in the order of their layers, after the host's own."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> EngineSpec:
        document: dict[str, Any] = json.loads(line)
        links = tuple(LinkSpec(**fields) for fields in document.get("links", ()))
        lists = {name: tuple(document.get(name, ())) for name in ("devices", "files", "overrides")}
        draft = DraftSpec(**document.get("draft", {}))
        pace = PaceSpec(**fields) if (fields := document.get("pace")) else None
        states = StatesSpec(**fields) if (fields := document.get("states")) else None
        adapters = tuple(AdapterSpec(**fields) for fields in document.get("adapters", ()))
        parts = {"links": links, "adapters": adapters, "draft": draft, "pace": pace, "states": states}
        return cls(**{**document, **lists, **parts})

    def library_paths(self) -> dict[str, Path]:
        return {name: Path(path) for name, path in self.libraries.items()}


@frozen
class MainMemorySpec:
    """Weights of a GPU's layers that lie in main memory, where the CPU computes with them."""

    pattern: str
    """Found in their names."""
    layers: int | None
    """Of the first so many layers; None: of all."""
    quota_bytes: int


@frozen
class WorkerSpec:
    """Everything that a worker child is told."""

    socket: str
    """The unix socket on which it is handed its links."""
    device: str
    threads: int
    quota_bytes: int
    libraries: dict[str, str]
    models: dict[str, list[str]] = field(default_factory=dict)
    """Files by fingerprint."""
    main_memory: MainMemorySpec | None = None
    trace: str | None = None
    poison: bool = False
    """For tests: between runs, the memory of graphs is filled with what is not a number."""
    lacks: str | None = None
    """For tests: an op that this worker does not know."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> WorkerSpec:
        document: dict[str, Any] = json.loads(line)
        main_memory = MainMemorySpec(**fields) if (fields := document.get("main_memory")) else None
        return cls(**{**document, "main_memory": main_memory})
