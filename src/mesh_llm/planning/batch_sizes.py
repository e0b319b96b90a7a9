"""How many tokens of a prompt the engine takes at once. Pure.

Between two steps it can say a token to everybody else, hear that a client
left, and tell its figures: a step is kept short. Its length is a number of
tokens, so the speed that is foretold for the plan turns time into tokens: that
of a long prompt, as it is those that others notice.
"""

from __future__ import annotations

from mesh_llm.defaults import ENGINE_STEP_S, PROMPT_MICRO_BATCH
from mesh_llm.frozen import frozen
from mesh_llm.types import ModelFacts, Plan

SMALLEST, LARGEST = 128, 2048
"""Below, products of matrices are slow for their size; above, nothing becomes faster."""
SMALLEST_SPLIT = 512
IN_FLIGHT = 8
"""Micro-batches of one step: with that many, three stages work side by side for four fifths of the time."""
SMALLEST_MICRO = 64
"""Two nodes, SmolLM2, prompts of 2,000 tokens: 512 in micro-batches of 64 come to 0.97 of 2,048 in such of
128, 256 of 64 to 0.8, 256 of 32 to 0.4."""
MICRO_BATCH = 512
"""The engine's own: scratch memory is counted for it."""
_ROUND = 64
"""Attention is computed for so many tokens at a time. Where that rounds otherwise than for fewer
(native/cpu_attention.cmake), prompts are read alike in multiples of it, whatever the size of a batch."""


@frozen
class Beside:
    """Tokens of prompts in a step while others wait for their next token."""

    usual: int
    fewest: int
    """Where the usual number takes far too long."""


BESIDE, BESIDE_SPLIT = Beside(usual=64, fewest=16), Beside(usual=256, fewest=64)
"""SmolLM2 on one core, 1,500 tokens: in steps of 64 prompts are read at 0.95 of the speed of 128 or more, of
32 or 16 at 0.6 (x86-64) or 0.8 (Neoverse-N1), as attention is computed for 64 at a time."""


@frozen
class Batches:
    step: int
    """Tokens between two looks at everybody (n_batch)."""
    micro: int
    """Tokens that are computed together (n_ubatch)."""
    beside: Beside | None = None
    """None: whoever waits has to wait for all of a step."""


def batches(plan: Plan, model: ModelFacts, *, whole: bool = False, images: bool = False) -> Batches:
    """For an engine that runs `plan`; `whole`: its inputs cannot be cut, as those of embeddings."""
    if whole:
        size = micro_batch(model)
        return Batches(step=size, micro=size)
    step = _in_time(plan)
    if images:
        # An image of a model that looks at it as a whole has to fit into one.
        step = max(step, MICRO_BATCH)
    if plan.workers and not images:
        # With one batch in each step, its stages would wait for each other.
        step = max(step, SMALLEST_SPLIT)
        micro = min(PROMPT_MICRO_BATCH, max(SMALLEST_MICRO, _rounded(step // IN_FLIGHT + _ROUND // 2)))
        return Batches(step=step, micro=micro, beside=BESIDE_SPLIT)
    return Batches(step=step, micro=min(step, MICRO_BATCH), beside=None if images else BESIDE)


def micro_batch(model: ModelFacts) -> int:
    """The most that is ever computed together."""
    return min(LARGEST, max(MICRO_BATCH, model.context_trained)) if model.encodes else MICRO_BATCH


def _in_time(plan: Plan) -> int:
    if plan.predicted is None:
        return MICRO_BATCH
    in_time = int(min(LARGEST, ENGINE_STEP_S * plan.predicted.prompt_tok_s))
    return max(SMALLEST, _rounded(in_time))


def _rounded(tokens: int) -> int:
    return tokens - tokens % _ROUND
