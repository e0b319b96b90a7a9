"""Nouns that more than one package speaks: models, memory, devices, engines.

Everything here is frozen and free of behaviour beyond arithmetic on its own
fields, so that it can cross threads, processes and pure functions alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NewType

NodeId = NewType("NodeId", str)
Fingerprint = NewType("Fingerprint", str)
Setting = bool | int | float | str
"""A value of one of the engine's own settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What one layer keeps per sequence, as llama.cpp allocates it.

    Attention layers store `k_width` and `v_width` elements per cell of context;
    a `window` above zero bounds the cells. Recurrent layers store
    `state_bytes` per sequence whatever its length.
    """

    k_width: int = 0
    v_width: int = 0
    window: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    weight_bytes: int
    cache: LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a GGUF says about itself; enough to plan memory without loading it."""

    files: tuple[Path, ...]
    fingerprint: Fingerprint
    size_bytes: int
    name: str
    architecture: str
    quantisation: str
    layers: tuple[Layer, ...]
    embedding_bytes: int
    head_bytes: int
    """Bytes of the output head; 0 when it is tied to the embedding."""
    other_bytes: int
    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int
    context_trained: int
    experts: int
    experts_used: int
    expert_feed_forward: int
    """Inner width of one expert; 0 without experts."""
    query_elements: int
    """Elements per token that attention holds at once for all its queries."""
    widest: int
    """Elements per token of the widest product of a layer's matrices, over all chosen experts."""
    causal: bool
    """False for encoders and rerankers, which keep no cache."""
    pooled: bool
    """True where the file asks for pooling: an embedding or reranking model."""
    chat_template: str | None

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.weight_bytes for layer in self.layers)
        return layers + self.embedding_bytes + self.head_bytes + self.other_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    weight_bytes: int
    cache_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    INTEGRATED = "integrated"
    ACCELERATOR = "accelerator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A ggml device of this machine."""

    name: str
    description: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int


class State(StrEnum):
    """What a node is doing; the words of `status` and `/health`."""

    STARTING = "starting"
    WAITING = "waiting"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step of something that takes a while, for people to look at."""

    what: str
    done: int
    total: int
    unit: str = ""


ProgressSink = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a person who watches a node wants to read."""

    kind: str
    text: str


EventSink = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounters:
    """What one worker has done for an engine since they were linked: sums, for their differences."""

    runs: int
    compute_ns: int
    wait_ns: int
    """That the worker waited for something to do."""
    sent_bytes: int
    """From the host to the worker."""
    received_bytes: int
    worker_in_bytes: int
    """All that reached the worker, also from its neighbours."""
    worker_out_bytes: int
    weight_bytes: int
    """Of the bytes sent: weights, for want of the model's file over there."""
    queued: int
    """Commands that waited behind the last run."""
    in_flight: int
