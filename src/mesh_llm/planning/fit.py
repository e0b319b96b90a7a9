"""How much memory a model needs, how much context fits, and what to say when it does not.

Follows what llama.cpp build 11549 allocates for a server with
`n_ctx = context * slots`, `n_parallel = slots` and a cache of its own for
every slot (`kv_unified` off).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from mesh_llm.errors import ModelDoesNotFit, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import Draft
from mesh_llm.types import Layer, MemoryNeed, ModelFacts

SMALLEST_CONTEXT = 512
"""Tokens per slot below which a chat model cannot hold a question and its answer."""
CONTEXT_STEP = 256
"""The engine rounds the cells of every slot up to this."""

CHECKPOINTS = 4
"""For each slot of a recurrent model: states to go back to where the end of a text has changed."""

_F32_BYTES = 4
_MASK_BYTES = 2
"""Flash attention takes its mask as F16."""
_GB = 1e9

_BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Cache types: elements and bytes of one block."""


@frozen
class CacheSettings:
    """How the engine is asked to run a model, as far as memory depends on it."""

    context: int
    """Tokens per slot."""
    slots: int
    type_k: str = "f16"
    type_v: str = "f16"
    micro_batch: int = 512
    flash_attention: bool = True
    guesses: int = 0
    """Tokens that are guessed ahead at once, at most: their logits are kept, too."""
    draft: Draft | None = None
    """Lies on the host, with a cache as long as the model's."""
    adapter_bytes: int = 0
    """Of LoRA adapters: whoever computes with the model has all of them in memory."""
    snapshots: int = 0
    """States of a recurrent model's last tokens that are kept, beside that of the last."""
    lanes: int = 1
    """Engines of a split plan: each has slots, caches and scratch memory of its own."""

    def __post_init__(self) -> None:
        if self.context < 1 or self.slots < 1 or self.micro_batch < 1:
            raise UsageError("context, slots and micro-batch must be at least 1")
        for kind in (self.type_k, self.type_v):
            if kind not in _BLOCKS:
                raise UsageError(f"{kind} is not a cache type; choose one of {', '.join(_BLOCKS)}")

    def __str__(self) -> str:
        return f"{self.slots} {'slot' if self.slots == 1 else 'slots'} of {self.context} tokens"

    @property
    def cells(self) -> int:
        """Cells of one slot's cache."""
        return _padded(self.context)

    @property
    def draft_bytes(self) -> int:
        """All that a draft model takes on the host."""
        if self.draft is None:
            return 0
        cache = self.draft.cache_bytes * self.cells * self.slots
        return self.lanes * (self.draft.weight_bytes + cache + self.draft.compute_bytes)

    def beside_bytes(self, *, host: bool) -> int:
        """What a node of the plan needs for other files than the model's."""
        return self.draft_bytes + self.lanes * self.adapter_bytes if host else self.adapter_bytes

    @property
    def tokens(self) -> int:
        """Tokens computed at once; never more than the whole context holds."""
        return min(self.micro_batch, self.context * self.slots)


def layer_cache_bytes(layer: Layer, settings: CacheSettings) -> int:
    """Bytes of one layer's cache, all slots of all lanes together."""
    return _cache_bytes(layer, layer.cache.v_width, settings)


def checkpoint_bytes(layers: Iterable[Layer], settings: CacheSettings) -> int:
    """Of what these layers save of their state, all slots together; attention is rolled back without."""
    # One more is saved before each guess.
    count = CHECKPOINTS + (settings.guesses > 0)
    return settings.lanes * count * settings.slots * sum(layer.cache.state_bytes for layer in layers)


def cache_bytes(facts: ModelFacts, settings: CacheSettings) -> int:
    if settings.flash_attention:
        return sum(layer_cache_bytes(layer, settings) for layer in facts.layers)
    # Without flash attention values lie transposed, and every layer gets the width of the widest.
    widest = max(layer.cache.v_width for layer in facts.layers)
    return sum(_cache_bytes(layer, widest if layer.cache.v_width else 0, settings) for layer in facts.layers)


def _cache_bytes(layer: Layer, v_width: int, settings: CacheSettings) -> int:
    per_cell = _row_bytes(layer.cache.k_width, settings.type_k) + _row_bytes(v_width, settings.type_v)
    state_bytes = layer.cache.state_bytes * (1 + settings.snapshots)
    per_slot = per_cell * _cells(layer.cache.window, settings) + state_bytes
    return settings.lanes * per_slot * settings.slots


def _row_bytes(width: int, kind: str) -> int:
    elements, size = _BLOCKS[kind]
    return -(-width // elements) * size


def _cells(window: int, settings: CacheSettings) -> int:
    if window == 0:
        return settings.cells
    # The micro-batch on top: its first token still needs a full window when its last is stored.
    return _padded(min(settings.cells, window + settings.tokens))


def _padded(count: int) -> int:
    return -(-count // CONTEXT_STEP) * CONTEXT_STEP


def compute_bytes(facts: ModelFacts, settings: CacheSettings, *, logits: bool = True) -> int:
    """Scratch memory of one micro-batch, and the logits that are kept for sampling.

    Without `logits`: of a stage in the middle of a split model, which has none.

    The engine reuses memory as it walks through the graph, so the peak of one
    step counts, not the sum. For models with the measures of ten published
    ones, from 0.1 to 30 billion parameters, it is within 10 % of these terms:

    - six hidden states: input, residuals, and what a norm reads and writes;
    - the largest of: queries in attention; gate, up and their product in a
      dense layer or in the chosen experts; results of the chosen experts,
      weighted and not; any other product and its copy;
    - one mask per kind of cache, shared by the layers;
    - without flash attention, the scores of all heads over all cells.
    """
    # The engine rounds up to a multiple of the slots; the most that this adds keeps the need monotonic.
    tokens = settings.tokens + settings.slots - 1
    row = _F32_BYTES * tokens
    masks = sum(_mask_cells(facts, settings))
    if settings.flash_attention:
        attention, mask = row * facts.query_elements, _MASK_BYTES * tokens * masks
    else:
        scores = facts.heads * max(_mask_cells(facts, settings))
        attention, mask = row * (facts.query_elements + scores), row * masks
    outputs = _F32_BYTES * facts.vocabulary * settings.slots * (1 + settings.guesses) if logits else 0
    step = max(attention, row * _step_elements(facts), outputs)
    return settings.lanes * (6 * row * facts.hidden + step + mask + outputs)


def _step_elements(facts: ModelFacts) -> int:
    chosen = facts.experts_used
    return max(
        3 * facts.feed_forward,
        3 * chosen * facts.expert_feed_forward,
        2 * chosen * facts.hidden,
        2 * facts.widest,
    )


def _mask_cells(facts: ModelFacts, settings: CacheSettings) -> Iterable[int]:
    """Columns of each mask. Without a cache tokens look at each other."""
    windows = {layer.cache.window for layer in facts.layers if layer.cache.k_width}
    return [_cells(window, settings) for window in windows] or [settings.tokens]


def memory_need(facts: ModelFacts, settings: CacheSettings) -> MemoryNeed:
    return MemoryNeed(
        weight_bytes=facts.weight_bytes,
        cache_bytes=cache_bytes(facts, settings) + checkpoint_bytes(facts.layers, settings),
        compute_bytes=compute_bytes(facts, settings) + settings.beside_bytes(host=True),
    )


def stage_need(
    facts: ModelFacts, settings: CacheSettings, layers: tuple[int, int], *, host: bool, head: bool
) -> MemoryNeed:
    """What layers [first, last) take on one node of a split model.

    The host has the embedding besides, and `head` tells who has the output
    head: where that is tied to the embedding, a worker needs a copy of it.
    A worker's sessions share its weights. Each lane of the host is a process, whose
    weights are shared only as far as they lie in memory as in the file: all are counted.
    """
    own = facts.layers[slice(*layers)]
    weights = sum(layer.weight_bytes for layer in own)
    if host:
        weights += facts.embedding_bytes + facts.other_bytes
    if head:
        weights += facts.head_bytes if host else facts.head_bytes or facts.embedding_bytes
    return MemoryNeed(
        weight_bytes=weights * settings.lanes if host else weights,
        cache_bytes=sum(layer_cache_bytes(layer, settings) for layer in own)
        + checkpoint_bytes(own, settings),
        compute_bytes=compute_bytes(facts, settings, logits=host or head) + settings.beside_bytes(host=host),
    )


def largest_context(facts: ModelFacts, settings: CacheSettings, available_bytes: int) -> int | None:
    """The most tokens per slot that fit into so many bytes; see `largest_context_where`."""
    return largest_context_where(
        facts, lambda context: _fits(facts, settings, context, available_bytes), at_least=None
    )


def smallest_context(facts: ModelFacts) -> int:
    return min(SMALLEST_CONTEXT, facts.context_trained)


def largest_context_where(
    facts: ModelFacts, fits: Callable[[int], bool], *, at_least: int | None
) -> int | None:
    """The most tokens per slot that fit: a multiple of 256, at most what the model was trained on.

    `at_least` is known to fit already. None where not even the smallest useful context fits.
    """
    smallest = at_least or smallest_context(facts)
    if at_least is None and not fits(smallest):
        return None
    low, high = smallest // CONTEXT_STEP, facts.context_trained // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * CONTEXT_STEP):
            low = middle
        else:
            high = middle - 1
    # A model trained on less than one step, or on an odd length below the smallest, keeps that.
    return max(low * CONTEXT_STEP, smallest)


def _fits(facts: ModelFacts, settings: CacheSettings, context: int, available_bytes: int) -> bool:
    need = memory_need(facts, replace(settings, context=context))
    return need.total_bytes <= available_bytes


def refusal(facts: ModelFacts, settings: CacheSettings, need: MemoryNeed, have_bytes: int) -> ModelDoesNotFit:
    """Why a model is not loaded, with what would help in numbers."""
    return ModelDoesNotFit(
        f"{facts.name} needs {gigabytes(need.total_bytes)} (weights {gigabytes(need.weight_bytes)}, "
        f"cache {gigabytes(need.cache_bytes)}, compute {gigabytes(need.compute_bytes)}) "
        f"for {settings}; this machine has {gigabytes(have_bytes)} free",
        hint=advice(facts, settings, have_bytes),
    )


def advice(facts: ModelFacts, settings: CacheSettings, have_bytes: int) -> str:
    """What a person could change so that the model fits."""
    ways = []
    if settings.draft is not None:
        plain = replace(settings, draft=None, guesses=0)
        if memory_need(facts, plain).total_bytes <= have_bytes:
            ways.append("--no-draft")
    shorter = largest_context(facts, settings, have_bytes)
    if shorter is not None:
        ways.append(f"--ctx-size {shorter}")
    if settings.slots > 1:
        alone = largest_context(facts, replace(settings, slots=1), have_bytes)
        if alone is not None and alone >= settings.context:
            ways.append("--parallel 1")
        elif alone is not None and alone > (shorter or 0):
            ways.append(f"--parallel 1 --ctx-size {alone}")
    if ways:
        return f"{' or '.join(ways)} would fit, as would a smaller quantisation or more machines"
    smallest = replace(settings, context=smallest_context(facts), slots=1)
    least = memory_need(facts, smallest).total_bytes
    return (
        f"it needs {gigabytes(least)} even with --parallel 1 --ctx-size {smallest.context}; "
        f"choose a smaller quantisation than {facts.quantisation}, or join more machines"
    )


def gigabytes(size: int) -> str:
    """For people: 5.6 GB, or 300 MB."""
    return f"{size / _GB:.1f} GB" if size >= _GB else f"{size / 1e6:.0f} MB"
