"""One client streams, another sends a long prompt: how long do tokens stall, and what does it cost?"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, ratio_row
from mesh_llm.bench.client import Client, TimedAnswer, client
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import Server
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "Tokens of one client while another sends a long prompt"

OURS, DEFAULT = "ours", "2048/512"
PROMPT_TOKENS = 3000
_UNDER_WAY = 8
"""Pieces of the stream before the prompt is sent."""
_VOCABULARY = 30_000
"""Token ids to draw from: ordinary words, and no text that a cache could know."""
_PAUSE_S = 0.2
_OPTIONS = ("--threads", "1")
"""As in `split`: threads that wait for each other on a machine that others use measure its scheduler."""
_BODY: dict[str, Any] = {
    "prompt": "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "n_predict": 6000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "cache_prompt": True,
    "id_slot": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    gaps_ms: Sample
    beside_tok_s: float
    alone_tok_s: float

    @property
    def median_ms(self) -> float:
        return self.gaps_ms.median

    @property
    def late_ms(self) -> float:
        gaps = sorted(self.gaps_ms.values)
        return gaps[min(len(gaps) - 1, round(0.95 * len(gaps)))]

    @property
    def longest_ms(self) -> float:
        return max(self.gaps_ms.values)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen: dict[str, list[Turn]] = defaultdict(list)
    dice = random.Random(3000)
    async with AsyncExitStack() as stack:
        home = stack.enter_context(servers.fresh_home())
        observed = await stack.enter_async_context(servers.observed_node(home, *_OPTIONS))
        sides = {
            OURS: observed.engine,
            DEFAULT: await stack.enter_async_context(servers.engine(_plain(observed.spec))),
        }
        asker = await stack.enter_async_context(client())
        for server in sides.values():
            await asker.ask(server, "/completion", {**_BODY, "n_predict": 8, "stream": False})
        rounds = plan.rounds(full=11, quick=3, full_s=420.0, quick_s=90.0)
        for number in rounds:
            prompt = [dice.randrange(1000, _VOCABULARY) for _ in range(PROMPT_TOKENS)]
            for name, server in turns(list(sides.items()), number):
                await asyncio.sleep(_PAUSE_S)
                seen[name].append(await _turn(asker, server, prompt))
    return _rows(seen), (f"turns, {rounds.note()}", *_notes(observed.spec, seen))


def _plain(spec: EngineSpec) -> EngineSpec:
    return replace(spec, batch=2048, micro_batch=512, pace=None)


async def _turn(asker: Client, server: Server, prompt: list[int]) -> Turn:
    alone = await _prefill(asker, server, prompt)
    under_way, answered = asyncio.Event(), asyncio.Event()

    def on_piece(count: int) -> bool:
        if count == _UNDER_WAY:
            under_way.set()
        return not answered.is_set()

    began = time.perf_counter()
    stream = asyncio.create_task(asker.stream(server, "/completion", _BODY, on_piece=on_piece))
    try:
        waiting = asyncio.create_task(under_way.wait())
        await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        sent_s = time.perf_counter() - began
        beside = await _prefill(asker, server, prompt)
        answered_s = time.perf_counter() - began
    finally:
        answered.set()
        await asyncio.wait((stream,))
    arrived = stream.result().arrived_s
    gaps = [1e3 * (late - early) for early, late in pairwise(arrived) if late > sent_s and early < answered_s]
    if not gaps or arrived[-1] < answered_s:
        raise MeshError("the stream ended before the long prompt was read")
    return Turn(gaps_ms=Sample.of(gaps), beside_tok_s=_speed(beside), alone_tok_s=_speed(alone))


async def _prefill(asker: Client, server: Server, prompt: list[int]) -> TimedAnswer:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": False, "id_slot": 1}
    answer = await asker.ask(server, "/completion", body)
    if answer.timings["prompt_n"] != len(prompt):
        raise MeshError(f"asked for {len(prompt)} tokens, the engine read {answer.timings['prompt_n']}")
    return answer


def _speed(answer: TimedAnswer) -> float:
    return float(answer.timings["prompt_per_second"])


def _rows(seen: dict[str, list[Turn]]) -> tuple[Row, ...]:
    def row(measure: str, figure: Callable[[Turn], float], unit: str, digits: int) -> Row:
        ours, theirs = (
            Side(name=name, sample=Sample.of([figure(turn) for turn in seen[name]]), unit=unit, digits=digits)
            for name in (OURS, DEFAULT)
        )
        return ratio_row(measure, (ours, theirs), None)

    return (
        row("gap between tokens, median", lambda turn: turn.median_ms, "ms", 0),
        row("gap between tokens, 95th percentile", lambda turn: turn.late_ms, "ms", 0),
        row("gap between tokens, longest", lambda turn: turn.longest_ms, "ms", 0),
        row("tokens streamed meanwhile", lambda turn: float(len(turn.gaps_ms.values)), "", 0),
        row(f"prefill of {PROMPT_TOKENS:,} tokens beside it", lambda turn: turn.beside_tok_s, "tok/s", 0),
        row(f"prefill of {PROMPT_TOKENS:,} tokens, alone", lambda turn: turn.alone_tok_s, "tok/s", 0),
    )


def _notes(spec: EngineSpec, seen: dict[str, list[Turn]]) -> tuple[str, ...]:
    return (
        f"ours: steps of {spec.batch} tokens, {spec.micro_batch} computed at once, as the node chose them by "
        f"the speed that it foretold; {_beside(spec)}; {spec.slots} slots, {spec.threads} threads",
        "gaps are those between the prompt's start and its answer; the figure is the median of the rounds' "
        "ratios",
        f"the longest gap of all rounds: {max(turn.longest_ms for turn in seen[OURS]):.0f} ms, and "
        f"{max(turn.longest_ms for turn in seen[DEFAULT]):.0f} ms on the other side",
    )


def _beside(spec: EngineSpec) -> str:
    if (pace := spec.pace) is None:
        return "no shorter while others wait"
    return (
        f"while others wait {pace.usual} or a multiple, for {1e3 * pace.seconds:.0f} ms, or {pace.fewest} at "
        "least for twice as long"
    )
