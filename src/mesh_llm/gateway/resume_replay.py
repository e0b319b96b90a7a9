"""Has the next engine compute what was said as the first one did, so that it goes on with the same word.

Our own library computes every token alike on most CPUs. Others compute 64 tokens and more at once in another
way than fewer, and round differently. The first engine read the prompt in large batches, and made the answer
token by token. The next one is first asked for a token after the prompt alone, and then after beginnings of
the answer, each some tokens longer than the one before. It remembers what it has read, and computes nothing
twice. Only then it is asked for the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.resume_cut import Cut
from mesh_llm.gateway.text_request import TextRequest

REPLAY_TOKENS = 48
"""Of an answer that are read at once: with some to spare below 64, as events are counted, and not tokens."""


def replay(generation: TextRequest, told: Sequence[bytes], cut: Cut) -> list[Document]:
    """What to ask before the rest of the answer; nothing where the dice would decide anyway."""
    if not generation.is_greedy:
        return []
    step = max(1, REPLAY_TOKENS * cut.events // max(1, cut.tokens))
    beginnings = [generation.asked]
    for events in range(step, cut.events, step):
        beginning = generation.continued(generation.dialect.said(told[:events]))
        if beginning is not None:
            beginnings.append(beginning)
    return [_one_token(generation, beginning) for beginning in beginnings]


def _one_token(generation: TextRequest, body: Document) -> Document:
    limits = dict.fromkeys(("n_predict", *generation.dialect.limits(body)), 1)
    return {**body, **limits, "cache_prompt": True}
