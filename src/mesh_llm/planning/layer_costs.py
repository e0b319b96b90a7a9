"""What ranges of a model's layers take and cost, summed up once so that each is one subtraction. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple, TypeVar

from mesh_llm.frozen import frozen
from mesh_llm.planning.fit import CacheSettings, checkpoint_bytes, compute_bytes, layer_cache_bytes
from mesh_llm.types import Layer, ModelFacts, NodeId, Place

_FEED_FORWARD_MATRICES = 3
"""Gate, up and down."""
_CACHED_BYTES = 2
"""Of an element; few people quantise the cache."""
_CELLS = 256
"""That the engine reads together, the empty ones, too."""


_Number = TypeVar("_Number", int, float)


class Span(NamedTuple):
    """Layers [first, last) on a node."""

    node: NodeId
    first: int
    last: int
    device: str = ""

    @property
    def place(self) -> Place:
        return Place(self.node, self.device)


@frozen
class LayerCosts:
    facts: ModelFacts
    settings: CacheSettings
    sums: tuple[int, ...]
    """Matrices, cache and checkpoints of the layers before each one; one entry more than layers."""
    experts: tuple[int, ...]
    """Likewise, of these bytes a mixture's experts."""
    active: tuple[float, ...]
    """Likewise, the bytes of weights that one token reads."""
    elements: tuple[float, ...]
    """Likewise, the weights that each token of a prompt is multiplied with."""
    operations: tuple[int, ...]
    """Likewise, the small operations of a token."""
    windows: tuple[tuple[int, tuple[int, ...]], ...]
    """For each window of attention, likewise, how many layers have it; 0: they attend to everything."""
    host_scratch_bytes: int
    worker_scratch_bytes: int
    head_bytes: int
    """Of the matrix that makes logits, tied to the embedding or not."""

    def scratch_bytes(self, *, host: bool, head: bool) -> int:
        """What a stage needs beside its layers."""
        own = self.host_scratch_bytes if host or head else self.worker_scratch_bytes
        return own + self.settings.beside_bytes(host=host)

    def copies_bytes(self, first: int, last: int, *, head: bool) -> int:
        """Weights of a host's layers that further lanes hold; see `fit.stage_need`."""
        if self.settings.lanes == 1:
            return 0
        weights = sum(layer.weight_bytes for layer in self.facts.layers[first:last])
        fixed = self.facts.embedding_bytes + self.facts.other_bytes
        return (self.settings.lanes - 1) * (weights + fixed + (self.facts.head_bytes if head else 0))

    def attention(self, first: int, last: int, tokens: int) -> float:
        """The elements of keys and values that a token of so long a prompt meets in layers [first, last).

        Like those of weights, and on average over its tokens.
        """
        met = sum(
            _attended(window, tokens) * (before[last] - before[first]) for window, before in self.windows
        )
        return self.facts.query_elements * met

    def cached_bytes(self, first: int, last: int, depth: int) -> float:
        """Keys and values that a token reads in layers [first, last) after so many others."""
        whole = -(-depth // _CELLS) * _CELLS
        cells = sum(
            min(whole, layer.cache.window or whole) * (layer.cache.k_width + layer.cache.v_width)
            for layer in self.facts.layers[first:last]
        )
        return _CACHED_BYTES * cells

    @property
    def least_bytes(self) -> int:
        """No node without so much memory, whatever its kind, holds the whole model."""
        fixed = self.facts.embedding_bytes + self.facts.other_bytes
        return fixed + self.sums[-1] + self.scratch_bytes(host=True, head=True)

    @property
    def count(self) -> int:
        return len(self.sums) - 1


def load_of(facts: ModelFacts, settings: CacheSettings) -> LayerCosts:
    largest = max(layer.weight_bytes for layer in facts.layers)
    return LayerCosts(
        facts=facts,
        settings=settings,
        sums=_sums(
            layer.weight_bytes + layer_cache_bytes(layer, settings) + checkpoint_bytes([layer], settings)
            for layer in facts.layers
        ),
        experts=_sums(layer.expert_bytes for layer in facts.layers),
        active=_sums(active_bytes(facts, layer, largest) for layer in facts.layers),
        elements=_sums(_active_elements(facts, layer) for layer in facts.layers),
        operations=_sums(layer.operations for layer in facts.layers),
        windows=tuple(
            (window, _sums(int(_attends(layer, window)) for layer in facts.layers))
            for window in {layer.cache.window for layer in facts.layers if layer.cache.k_width}
        ),
        host_scratch_bytes=compute_bytes(facts, settings),
        worker_scratch_bytes=compute_bytes(facts, settings, logits=False),
        head_bytes=facts.head_bytes or facts.embedding_bytes,
    )


def _sums(sizes: Iterable[_Number]) -> tuple[_Number, ...]:
    return tuple(accumulate(sizes, initial=0))


def active_bytes(facts: ModelFacts, layer: Layer, largest: int) -> float:
    """What one token reads of a layer: all of it, or in a mixture the chosen experts and what all share.

    Where only the header's sums are known, bytes are taken to divide as the
    weights do. Layers far below the `largest` are a mixture's dense ones.
    """
    if layer.weights:
        return sum(weights.bytes for weights in layer.weights)
    if not facts.experts or 2 * layer.weight_bytes < largest:
        return layer.weight_bytes
    experts = facts.experts * _expert_elements(facts)
    share = experts / max(1, experts + _attention_elements(facts, layer))
    return layer.weight_bytes * (1 - share * (1 - facts.experts_used / facts.experts))


def _active_elements(facts: ModelFacts, layer: Layer) -> float:
    if layer.weights:
        return sum(weights.elements for weights in layer.weights)
    dense = _FEED_FORWARD_MATRICES * facts.hidden * facts.feed_forward
    chosen = facts.experts_used * _expert_elements(facts)
    return _attention_elements(facts, layer) + (chosen if facts.experts else dense)


def _attends(layer: Layer, window: int) -> bool:
    return layer.cache.k_width > 0 and layer.cache.window == window


def _attended(window: int, tokens: int) -> float:
    """How many others a token of so long a prompt attends to, on average: the first to none."""
    most = min(tokens, window or tokens)
    return most - most**2 / (2 * tokens)


def _expert_elements(facts: ModelFacts) -> int:
    return _FEED_FORWARD_MATRICES * facts.hidden * facts.expert_feed_forward


def _attention_elements(facts: ModelFacts, layer: Layer) -> int:
    """Of the matrices for queries and results, keys and values."""
    return facts.hidden * (facts.query_elements + layer.cache.k_width + layer.cache.v_width)
