"""Decode and prefill: the node, the same engine without a node, the plain wheel."""

from __future__ import annotations

import asyncio
import platform
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, ratio_row
from bench.stats import Target, at_least
from mesh_llm.bench.client import Client, TimedAnswer, client
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.servers import Server
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "A solo node against its engine and against the plain wheel"

NODE, DIRECT, WHEEL = "node", "direct", "wheel"
PROMPT_TOKENS = (400, 1200)
DECODED = 128
_PAUSE_S = 0.1
"""Between two answers: idle threads of an engine spin for some milliseconds before they sleep."""
_TEXT = (
    "The keeper of the lighthouse wrote in her book every evening: the wind, the height of the water, "
    "which ships had passed and what they carried. On the fourteenth day a boat came without a name. "
)

Seen = dict[tuple[str, int], list[TimedAnswer]]
Figure = Callable[[TimedAnswer], float]


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen: Seen = defaultdict(list)
    # Servers are started anew in between: where a process happens to lie in memory is worth a
    # per cent or two, and stays with it as long as it lives.
    blocks = [
        plan.rounds(full=5, quick=3, full_s=120.0, quick_s=45.0) for _ in range(plan.choose(full=3, quick=1))
    ]
    for first_turn, rounds in enumerate(blocks):
        await _block(seen, first_turn, rounds)
    counts = tuple(f"block {number}, {rounds.note()}" for number, rounds in enumerate(blocks, 1))
    return _rows(seen), (*counts, *_notes(seen))


async def _block(seen: Seen, first_turn: int, rounds: Rounds) -> None:
    async with AsyncExitStack() as stack:
        home = stack.enter_context(servers.fresh_home())
        observed = await stack.enter_async_context(servers.observed_node(home))
        sides = {
            NODE: observed.node,
            DIRECT: await stack.enter_async_context(servers.engine(observed.spec)),
            WHEEL: await stack.enter_async_context(servers.engine(replace(observed.spec, libraries={}))),
        }
        asker = await stack.enter_async_context(client())
        prompts = await _prompts(asker, sides[DIRECT])
        for server in sides.values():
            await _complete(asker, server, prompts[PROMPT_TOKENS[0]], 16)
        for number in rounds:
            for size in PROMPT_TOKENS:
                for name, server in turns(list(sides.items()), first_turn + number):
                    await asyncio.sleep(_PAUSE_S)
                    seen[name, size].append(await _complete(asker, server, prompts[size], DECODED))


async def _prompts(asker: Client, server: Server) -> dict[int, list[int]]:
    """Exactly as many tokens as wanted, as numbers: nobody's tokeniser is part of it."""
    answer = await asker.ask(server, "/tokenize", {"content": _TEXT * (max(PROMPT_TOKENS) // 30)})
    tokens = answer.document["tokens"]
    if len(tokens) < max(PROMPT_TOKENS):
        raise MeshError(f"the bench's text has only {len(tokens)} tokens")
    return {size: tokens[:size] for size in PROMPT_TOKENS}


async def _complete(asker: Client, server: Server, prompt: list[int], decoded: int) -> TimedAnswer:
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": decoded,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answer = await asker.ask(server, "/completion", body)
    done = answer.timings["prompt_n"], answer.timings["predicted_n"]
    if done != (len(prompt), decoded):
        raise MeshError(f"asked for {len(prompt)} and {decoded} tokens, the engine did {done}")
    return answer


def _rows(seen: Seen) -> tuple[Row, ...]:
    rows = []
    for other, target in ((DIRECT, at_least(0.97)), (WHEEL, _wheel_target())):
        for size in PROMPT_TOKENS:
            for what, figure in _FIGURES.items():
                sides = _side(NODE, seen[NODE, size], figure), _side(other, seen[other, size], figure)
                rows.append(ratio_row(f"{what}, {size:,}-token prompt", sides, target))
    return tuple(rows)


def _side(name: str, answers: list[TimedAnswer], figure: Figure) -> Side:
    return Side(name=name, sample=Sample.of([figure(answer) for answer in answers]), unit="tok/s")


def _end_to_end(answer: TimedAnswer) -> float:
    return float(answer.timings["prompt_n"] + answer.timings["predicted_n"]) / answer.wall_s


_FIGURES: dict[str, Figure] = {
    "prefill": lambda answer: float(answer.timings["prompt_per_second"]),
    "decode": lambda answer: float(answer.timings["predicted_per_second"]),
    "end to end": _end_to_end,
}


def _wheel_target() -> Target | None:
    """Arm64 wheels are built for the oldest cores; on x86-64 the gain is reported, nothing is promised."""
    return at_least(1.8) if platform.machine().lower() in ("arm64", "aarch64") else None


def _notes(seen: Seen) -> tuple[str, ...]:
    texts = {
        name: {a.document["content"] for a in seen[name, PROMPT_TOKENS[0]]} for name in (NODE, DIRECT, WHEEL)
    }
    return (
        "tok/s of prefill and decode are the engine's own (`timings`); end to end is all tokens over the "
        "client's wall time; the figure is the median of the rounds' ratios",
        f"texts at temperature 0: {_agreement(texts[NODE], texts[DIRECT])} between node and direct, "
        f"{_agreement(texts[NODE], texts[WHEEL])} between node and wheel",
    )


def _agreement(ours: set[str], theirs: set[str]) -> str:
    return "equal in every round" if ours == theirs and len(ours) == 1 else "not equal"
